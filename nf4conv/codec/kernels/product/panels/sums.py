"""PTX of kernels.py: adds up the sums of a cluster, and stores them."""

import triton
import triton.language as tl


@triton.constexpr_function
def sum_assembly() -> str:
    """Adds up four sums of one program, or of the two of a cluster.

    Operands: $0 … $3 the sums; $4 their address; $5 how many programs.
    """
    lines = ["{", ".reg .pred p;", ".reg .b32 a;", ".reg .f32 c<8>;", "setp.gt.u32 p, $5, 1;"]
    for part in range(2):
        values = ", ".join(f"c{4 * part + i}" for i in range(4))
        guard = "@p " if part else ""
        lines += [
            f"{guard}mapa.shared::cluster.u32 a, $4, {part};",
            f"{guard}ld.shared::cluster.v4.f32 {{{values}}}, [a];",
        ]
    lines += [f"mov.f32 ${i}, c{i};" for i in range(4)]
    lines += [f"@p add.f32 ${i}, ${i}, c{4 + i};" for i in range(4)]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def store_assembly(dtype: tl.dtype) -> str:
    """Rounds four values and stores them.

    Operands: $0 anything; $1 … $4 the values; $5 their address, a multiple of four values; $6
    whether to.
    """
    lines = ["{", ".reg .pred p;", ".reg .b32 a, b;", "setp.ne.b32 p, $6, 0;"]
    if dtype.name == "fp32":
        lines += ["@p st.global.v4.f32 [$5], {$1, $2, $3, $4};"]
    else:
        kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
        lines += [f"cvt.rn.{kind}.f32 a, $2, $1;", f"cvt.rn.{kind}.f32 b, $4, $3;"]
        lines += ["@p st.global.v2.b32 [$5], {a, b};"]
    return "\n".join([*lines, "mov.b32 $0, 0;", "}"])
