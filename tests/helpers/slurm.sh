#!/usr/bin/env bash
# A SLURM of one machine, on loopback, for as long as a command runs: tests/helpers/slurm.sh COMMAND...
# As root, with the Debian packages slurm-wlm and munge. Ports and folders are its own; nothing is left.
set -euo pipefail

folder=$(mktemp -d)
chmod 755 "$folder"
export SLURM_CONF=$folder/slurm.conf

stop() {
  for name in slurmd slurmctld munged; do
    if [ -f "$folder/$name.pid" ]; then kill "$(cat "$folder/$name.pid")" || true; fi
  done
  sleep 1
  rm -rf "$folder"
}
trap stop EXIT

dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none
chmod 600 "$folder/munge.key"
munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" --force

read -r controller node < <(python3 -c '
import socket
free = [socket.socket() for _ in range(2)]
for one in free: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in free))')
host=$(hostname -s)
cat > "$SLURM_CONF" <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmdPort=$node
SlurmUser=root
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
MinJobAge=300
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=1000
PartitionName=all Nodes=$host Default=YES State=UP MaxTime=INFINITE
CONF
mkdir -p "$folder/state" "$folder/spool"
slurmctld
slurmd
for _ in $(seq 100); do
  if [ "$(sinfo --noheader --format %t 2> /dev/null)" = idle ]; then break; fi
  sleep 0.2
done
[ "$(sinfo --noheader --format %t)" = idle ] || { tail "$folder"/*.log >&2; exit 1; }
"$@"
