"""The loop that is counted is the one that a kernel spends its time in."""

import pytest

from kvq_core.testing.sass import Counts, parse, pipelined_loop

pytestmark = pytest.mark.quick

LISTING = """
	.target	sm_90a

		Function : attend
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                     /* 0x00000a00ff017b82 */
                                                                                              /* 0x000fe20000000800 */
        /*0010*/                   I2F.U32 R4, R2 ;                                           /* 0x0000000200047306 */
        /*0020*/                   HFMA2.MMA R98, -RZ, RZ, 0, 0 ;                             /* 0x00000000ff627435 */
        /*0030*/              @!P4 BRA 0x20 ;                                                 /* 0xfffffff800a0c947 */
        /*0040*/                   LDL R2, [R1] ;                                             /* 0x0000000001027983 */
        /*0050*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR6][R2.64] ;               /* 0x0000000002057fae */
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;                              /* 0x0000000000007b1d */
        /*0070*/                   LDS.U8 R8, [R7] ;                                          /* 0x0000000007087984 */
        /*0080*/                   LDS.128 R12, [R7] ;                                        /* 0x0000000007087984 */
        /*0090*/                   I2FP.F32.S32 R8, R8 ;                                      /* 0x0000000800087245 */
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;             /* 0x00000002ff0075a7 */
        /*00b0*/              @!P0 BRA 0x120 ;                                                /* 0x0000000400888947 */
        /*00c0*/                   HMMA.16816.F32 R8, R4, R12, R8 ;                           /* 0x0000000c0408723c */
        /*00d0*/                   FRND.FTZ.FLOOR R9, R8 ;                                    /* 0x0000000800097307 */
        /*00e0*/                   BRA.U UP0, 0x50 ;                                          /* 0xfffffff400a0c947 */
        /*00f0*/                   LDGSTS.E [R5], desc[UR6][R2.64] ;                          /* 0x0000000002057fae */
        /*0100*/               @P1 BRA 0x40 ;                                                 /* 0xfffffff400a0c947 */
        /*0110*/                   EXIT ;                                                     /* 0x000000000000794d */
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;             /* 0x00000002ff0075a7 */
        /*0130*/              @!P0 BRA 0x120 ;                                                /* 0x0000000400888947 */
        /*0140*/                   BRA 0xc0 ;                                                 /* 0xfffffff400a0c947 */
        /*0150*/                   BRA 0x150;                                                 /* 0xfffffffc00fc7947 */
"""
"""As cuobjdump prints it: a first loop without copies, a loop over tiles in a loop over work, a wait laid out after the end."""


def test_the_loop_is_the_innermost_with_products_and_copies() -> None:
    code = parse(LISTING)
    loop = pipelined_loop(code)
    assert loop is not None
    # Its wait is in it; 0x40 and 0xf0 are only in the loop around it.
    assert [one.address for one in loop] == [*range(0x50, 0xF0, 0x10), 0x120, 0x130, 0x140]
    assert Counts.of(loop) == Counts(instructions=13, conversions=1, roundings=1, byte_loads=1, barriers=1, local=0)
    assert Counts.of(code) == Counts(instructions=22, conversions=2, roundings=1, byte_loads=1, barriers=1, local=1)
    assert pipelined_loop(parse(LISTING.replace("HMMA", "MOV"))) is pipelined_loop(parse(LISTING.replace("LDGSTS", "MOV"))) is None


def test_of_loops_beside_each_other_it_is_that_of_whole_tiles() -> None:
    def loop(first: int, products: int, others: int) -> list[str]:
        body = ["LDGSTS.E [R5], desc[UR6][R2.64]", *["HMMA.16816.F32 R8, R4, R12, R8"] * products, *["FADD R2, R2, R3"] * others]
        return [*body, f"@P0 BRA {first:#x}"]

    for around in (loop(0, 1, 0) + loop(0x30, 4, 3), loop(0, 4, 9) + loop(0xF0, 4, 3)):
        code = parse("".join(f"        /*{16 * n:04x}*/  {text} ;\n" for n, text in enumerate([*around, "EXIT"])))
        found = pipelined_loop(code)
        assert found is not None and found == code[-len(loop(0, 4, 3)) - 1 : -1]
