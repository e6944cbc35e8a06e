"""The floor under comparing: files are read by so many threads, and what is read is dropped.

Prints the seconds as JSON. Usage: python -m benchmarks.reading THREADS FOLDER...
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PIECE = 2**22
_room = threading.local()


def read(file: Path, start: int) -> None:
    if not hasattr(_room, "bytes"):
        _room.bytes = bytearray(_PIECE)
    with file.open("rb", buffering=0) as opened:
        os.preadv(opened.fileno(), [_room.bytes], start)


if __name__ == "__main__":
    files = [file for folder in sys.argv[2:] for file in sorted(Path(folder).glob("*.safetensors"))]
    places = [(file, start) for file in files for start in range(0, file.stat().st_size, _PIECE)]
    started = time.perf_counter()
    with ThreadPoolExecutor(int(sys.argv[1])) as pool:
        list(pool.map(lambda place: read(*place), places))
    print(json.dumps({"seconds": time.perf_counter() - started}))
