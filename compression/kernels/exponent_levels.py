"""The levels of the exponent codec as textual LLVM IR: exponents to codes, their escapes to codes, and so on.

Every level is the same loop, around the steps of an instruction set, over bytes that lie in the cache.
"""

from __future__ import annotations

from .exponent_isa import (
    BYTES,
    EIGHTS,
    FOURS,
    GROUP,
    TABLE_BYTES,
    PortableExponents,
    escape,
    plan_name,
    same,
    vector,
)
from .exponent_words import prefetch

_AHEAD = 128  # bytes to prefetch per step: memory would else rest while the levels work in the cache


def shorten(isa: PortableExponents, k: int) -> str:
    """One level: ``num`` exponents to codes, padded to a multiple of 64 with the table's first exponent.

    The escapes come to the front of the exponents and are counted.
    """
    return f"""
define internal i64 @shorten{k}(ptr %exponents, i64 %num, ptr noalias %codes, ptr %table, ptr %book,
                               ptr %ahead) noinline {{
entry:
  %none = icmp eq i64 %num, 0
  br i1 %none, label %done, label %ready
ready:
  %common = load i8, ptr %table
  %end = getelementptr i8, ptr %exponents, i64 %num
  call void @llvm.memset.p0.i64(ptr %end, i8 %common, i64 {GROUP}, i1 false)
{isa.encoder(k)}
  br label %step
step:
  %i = phi i64 [0, %ready], [%i.next, %step]
  %n = phi i64 [0, %ready], [%n.next, %step]
  %from = getelementptr {BYTES}, ptr %exponents, i64 %i
{prefetch("%ahead", _AHEAD)}
  %e = load {BYTES}, ptr %from, align 64
{isa.encode(k)}
{isa.fours(k)}
  %codes.to = getelementptr [{8 * k} x i8], ptr %codes, i64 %i
{_store_codes(k)}
{_escapes(k)}
  %to = getelementptr i8, ptr %exponents, i64 %n
{isa.gather()}
  %n.next = add i64 %n, %ones
  %i.next = add i64 %i, 1
  %groups = call i64 @groups(i64 %num)
  %all = icmp eq i64 %i.next, %groups
  br i1 %all, label %done, label %step, !llvm.loop !1
done:
  %found = phi i64 [0, %entry], [%n.next, %step]
  ret i64 %found
}}"""


def restore(isa: PortableExponents, k: int) -> str:
    """Undo ``shorten`` and return the escapes; of more than ``num_escapes`` the bytes mean nothing."""
    return f"""
define internal i64 @restore{k}(ptr noalias %codes, ptr noalias %source, i64 %num_escapes, i64 %num,
                                ptr noalias %table, ptr noalias %exponents, ptr %ahead) noinline {{
entry:
  %none = icmp eq i64 %num, 0
  br i1 %none, label %done, label %ready
ready:
{isa.decoder(k)}
  br label %step
step:
  %i = phi i64 [0, %ready], [%i.next, %step]
  %n = phi i64 [0, %ready], [%n.next, %step]
{prefetch("%ahead", _AHEAD)}
  %codes.from = getelementptr [{8 * k} x i8], ptr %codes, i64 %i
{_load_codes(k)}
{isa.codes(k)}
{_escapes(k)}
{isa.decode(k)}
  %place = call i64 @llvm.umin.i64(i64 %n, i64 %num_escapes)
  %from = getelementptr i8, ptr %source, i64 %place
  %to = getelementptr {BYTES}, ptr %exponents, i64 %i
{isa.spread()}
  %n.next = add i64 %n, %ones
  %i.next = add i64 %i, 1
  %groups = call i64 @groups(i64 %num)
  %all = icmp eq i64 %i.next, %groups
  br i1 %all, label %done, label %step, !llvm.loop !1
done:
  %found = phi i64 [0, %entry], [%n.next, %step]
  ret i64 %found
}}"""


def _escapes(k: int) -> str:
    return f"""
  %escapes = icmp eq {BYTES} %c, {same("i8", escape(k), GROUP)}
  %mask = bitcast <{GROUP} x i1> %escapes to i64
  %ones = call i64 @llvm.ctpop.i64(i64 %mask)"""


def _store_codes(k: int) -> str:
    """The lowest 4 k bits of the words %fours, one after another."""
    if k % 2 == 0:
        return f"""
  %dense = trunc {FOURS} %fours to <16 x i{4 * k}>
  store <16 x i{4 * k}> %dense, ptr %codes.to, align 1"""
    places = vector("i32", [8 * word + byte for word in range(8) for byte in range(k)])
    return f"""
  %halves = bitcast {FOURS} %fours to {EIGHTS}
  %second = lshr {EIGHTS} %halves, {same("i64", 32 - 4 * k, 8)}
  %eights = or {EIGHTS} %halves, %second
  %eights.bytes = bitcast {EIGHTS} %eights to {BYTES}
  %dense = shufflevector {BYTES} %eights.bytes, {BYTES} poison, <{8 * k} x i32> {places}
  store <{8 * k} x i8> %dense, ptr %codes.to, align 1"""


def _load_codes(k: int) -> str:
    """8 k bits each to the words %eights."""
    if k != 3:
        return f"""
  %dense = load <8 x i{8 * k}>, ptr %codes.from, align 1
  %eights = zext <8 x i{8 * k}> %dense to {EIGHTS}"""
    places = vector("i32", [3 * word + byte if byte < 3 else 24 for word in range(8) for byte in range(8)])
    return f"""
  %dense = load <24 x i8>, ptr %codes.from, align 1
  %eights.bytes = shufflevector <24 x i8> %dense, <24 x i8> zeroinitializer, <64 x i32> {places}
  %eights = bitcast {BYTES} %eights.bytes to {EIGHTS}"""


def shorten_block(isa: PortableExponents, plan: tuple[int, ...]) -> str:
    """A block's exponents to its codes of the first level and its tail, whose length is returned."""
    (k1, k2, k3), book = plan, isa.book_bytes
    return f"""
define internal i64 @shorten_block{plan_name(plan)}(
    ptr %exponents, i64 %num, ptr noalias %codes, ptr noalias %tail, ptr noalias %tables, ptr noalias %books,
    ptr %ahead) noinline {{
  %table2 = getelementptr i8, ptr %tables, i64 {TABLE_BYTES}
  %table3 = getelementptr i8, ptr %tables, i64 {2 * TABLE_BYTES}
  %book2 = getelementptr i8, ptr %books, i64 {book}
  %book3 = getelementptr i8, ptr %books, i64 {2 * book}
  %n1 = call i64 @shorten{k1}(ptr %exponents, i64 %num, ptr %codes, ptr %tables, ptr %books, ptr %ahead)
  %codes2 = getelementptr i8, ptr %tail, i64 8
  %n2 = call i64 @shorten{k2}(ptr %exponents, i64 %n1, ptr %codes2, ptr %table2, ptr %book2, ptr %ahead)
  %groups2 = call i64 @groups(i64 %n1)
  %codes3 = getelementptr [{8 * k2} x i8], ptr %codes2, i64 %groups2
  %n3 = call i64 @shorten{k3}(ptr %exponents, i64 %n2, ptr %codes3, ptr %table3, ptr %book3, ptr %ahead)
  %groups3 = call i64 @groups(i64 %n2)
  %plain = getelementptr [{8 * k3} x i8], ptr %codes3, i64 %groups3
  call void @llvm.memcpy.p0.p0.i64(ptr %plain, ptr %exponents, i64 %n3, i1 false)
  %n2.high = shl i64 %n2, 16
  %n3.high = shl i64 %n3, 32
  %n12 = or i64 %n1, %n2.high
  %head = or i64 %n12, %n3.high
  store i64 %head, ptr %tail, align 1
{_tail_length()}
  ret i64 %length
}}"""


def restore_block(plan: tuple[int, ...]) -> str:
    """Undo ``shorten_block`` and say whether codes, numbers and the tail's ``size``, at least 8, agree."""
    k1, k2, k3 = plan
    return f"""
define internal i1 @restore_block{plan_name(plan)}(
    ptr noalias %codes, ptr noalias %tail, i64 %size, i64 %num, ptr noalias %tables, ptr noalias %exponents,
    ptr noalias %other, ptr %ahead) noinline {{
entry:
  %head = load i64, ptr %tail, align 1
  %n1 = and i64 %head, 65535
  %head2 = lshr i64 %head, 16
  %n2 = and i64 %head2, 65535
  %n3 = lshr i64 %head, 32
  %codes2 = getelementptr i8, ptr %tail, i64 8
  %groups2 = call i64 @groups(i64 %n1)
  %codes3 = getelementptr [{8 * k2} x i8], ptr %codes2, i64 %groups2
  %groups3 = call i64 @groups(i64 %n2)
  %plain = getelementptr [{8 * k3} x i8], ptr %codes3, i64 %groups3
{_tail_length()}
  %less1 = icmp ule i64 %n1, %num
  %less2 = icmp ule i64 %n2, %n1
  %less3 = icmp ule i64 %n3, %n2
  %exact = icmp eq i64 %length, %size
  %less12 = and i1 %less1, %less2
  %less = and i1 %less12, %less3
  %sound = and i1 %less, %exact
  br i1 %sound, label %levels, label %bad
levels:
  %table2 = getelementptr i8, ptr %tables, i64 {TABLE_BYTES}
  %table3 = getelementptr i8, ptr %tables, i64 {2 * TABLE_BYTES}
  call void @llvm.memcpy.p0.p0.i64(ptr %exponents, ptr %plain, i64 %n3, i1 false)
  %found3 = call i64 @restore{k3}(ptr %codes3, ptr %exponents, i64 %n3, i64 %n2,
                               ptr %table3, ptr %other, ptr %ahead)
  %found2 = call i64 @restore{k2}(ptr %codes2, ptr %other, i64 %n2, i64 %n1,
                               ptr %table2, ptr %exponents, ptr %ahead)
  %found1 = call i64 @restore{k1}(ptr %codes, ptr %exponents, i64 %n1, i64 %num,
                               ptr %tables, ptr %other, ptr %ahead)
  %same3 = icmp eq i64 %found3, %n3
  %same2 = icmp eq i64 %found2, %n2
  %same1 = icmp eq i64 %found1, %n1
  %same23 = and i1 %same2, %same3
  %agrees = and i1 %same23, %same1
  ret i1 %agrees
bad:
  ret i1 false
}}"""


def _tail_length() -> str:
    return """
  %plain.end = getelementptr i8, ptr %plain, i64 %n3
  %from.int = ptrtoint ptr %tail to i64
  %to.int = ptrtoint ptr %plain.end to i64
  %length = sub i64 %to.int, %from.int"""
