"""Triton functions that generated kernels call; the only door to libdevice."""

from __future__ import annotations

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:
    from trainfuse.codegen import interpreted as libdevice
    from trainfuse.codegen.interpreted import (
        product,
        reduce_max,
        reduce_min,
        reduce_sum,
        reduce_sums,
        wait_for_previous,
        widen,
    )
else:
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import gdc_wait

    @triton.jit
    def wait_for_previous():
        """Wait until everything before this kernel in its stream is done, and to be seen here.

        First of all: a kernel launched to start early has nothing else that orders it.
        """
        gdc_wait()

    @triton.jit
    def reduce_max(x, axis: tl.constexpr, keep_dims: tl.constexpr):
        """Maximum along an axis; a NaN wins, as in ATen (tl.max drops it)."""
        return tl.reduce(x, axis, maximum, keep_dims=keep_dims)

    @triton.jit
    def reduce_min(x, axis: tl.constexpr, keep_dims: tl.constexpr):
        """Minimum along an axis; a NaN wins, as in ATen (tl.min drops it)."""
        return tl.reduce(x, axis, minimum, keep_dims=keep_dims)

    @triton.jit
    def reduce_sum(x, axis: tl.constexpr, keep_dims: tl.constexpr):
        """Sum along an axis."""
        return tl.sum(x, axis, keep_dims=keep_dims)

    @triton.jit
    def reduce_sums(x, y, axis: tl.constexpr, keep_dims: tl.constexpr):
        """Two sums along an axis, for which warps wait for each other as for one."""
        return tl.reduce((x, y), axis, _add_both, keep_dims=keep_dims)

    @triton.jit
    def _add_both(a, b, c, d):
        return a + c, b + d

    @triton.jit
    def widen(x):
        """A half tile in fp32, made anew at each call.

        Two casts of one tile would be merged, and the wide tile kept in twice the registers: what
        assembly gives can't be told to be the same.
        """
        if x.dtype == tl.bfloat16:
            wide = _widen_pairs(x, False)
        else:
            again = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
            )
            wide = again.to(tl.float32)
        return wide

    @triton.jit
    def _widen_pairs(x, PURE: tl.constexpr):
        """bf16 in fp32, an instruction each: ptxas takes two for the upper one of a register."""
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=PURE,
            pack=2,
        )

    @triton.jit
    def product(a, b):
        """Low and high words of a product of words, of one instruction.

        Of tl.umulhi and `*` ptxas makes two. Where 64-bit arithmetic gives both, Triton's cost
        model rather moves the results between threads than have them where they are needed.
        """
        return tl.inline_asm_elementwise(
            "{ .reg .b64 both; mul.wide.u32 both, $2, $3; mov.b64 {$0, $1}, both; }",
            "=r,=r,r,r",
            [a, b],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


__all__ = [
    "libdevice",
    "product",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "reduce_sums",
    "wait_for_previous",
    "widen",
]


@triton.jit
def maximum(a, b):
    """max(a, b), NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """min(a, b), NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fmax(a, b):
    """max(a, b), the other one if either is NaN; in both modes and all versions of Triton."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.maximum(a, b)))


@triton.jit
def fmin(a, b):
    """min(a, b), the other one if either is NaN."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.minimum(a, b)))


@triton.jit
def floor_divide_int(a, b):
    """Integers divided towards minus infinity (Triton's // truncates)."""
    quotient = a // b
    remainder = a % b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder_int(a, b):
    """Remainder with the divisor's sign."""
    remainder = a % b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


@triton.jit
def remainder_float(a, b):
    """Remainder with the divisor's sign."""
    remainder = libdevice.fmod(a, b)
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


@triton.jit
def floor_divide_float(a, b):
    """Floor of a / b, exact near integers. Source: ATen's div_floor_floating."""
    remainder = libdevice.fmod(a, b)
    quotient = (a - remainder) / b
    quotient = tl.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    floored = tl.floor(quotient)
    floored = tl.where(quotient - floored > 0.5, floored + 1, floored)
    floored = tl.where(quotient == 0, libdevice.copysign(quotient * 0, a / b), floored)
    return tl.where(b == 0, a / b, floored)


@triton.jit
def keep(seed, offset, index, dropped: tl.constexpr):
    """trainfuse.keep_mask at positions `index` of its words, one Philox call an element.

    dropped: words below it drop their element.
    """
    quad = index // 4
    lane = index % 4
    r0, r1, r2, r3 = _philox(seed, offset, quad)
    bits = tl.where(lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3))
    return _kept(bits, dropped)


@triton.jit
def keep_vector(seed, offset, quad, dropped: tl.constexpr):
    """The same for 4 consecutive positions a quad: [Q] quads give [4 Q] elements."""
    r0, r1, r2, r3 = _philox(seed, offset, quad)
    pairs = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # [Q, 2, 2], in order of words
    return _kept(tl.reshape(pairs, (4 * quad.shape[0],)), dropped)


@triton.jit
def keep_rows(seed, offset, quad, dropped: tl.constexpr):
    """The same for a tile: [R, Q] quads give [R, 4 Q] elements."""
    r0, r1, r2, r3 = _philox(seed, offset, quad)
    pairs = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    return _kept(tl.reshape(pairs, (quad.shape[0], 4 * quad.shape[1])), dropped)


@triton.jit
def keep_run(seed, offset, first, count: tl.constexpr, dropped: tl.constexpr):
    """The same for consecutive positions from `first`, anywhere in a block of four words.

    Eight positions lie in three blocks at most, so a thread that holds them draws all their words.
    count: a power of two, at least 8.
    """
    quad = (first + tl.arange(0, count // 8) * 8) // 4
    a0, a1, a2, a3 = _philox(seed, offset, quad)
    b0, b1, b2, b3 = _philox(seed, offset, quad + 1)
    c0, c1, c2, _ = _philox(seed, offset, quad + 2)
    two, one = first % 4 >= 2, first % 2 == 1
    a0, a1, a2 = tl.where(two, a2, a0), tl.where(two, a3, a1), tl.where(two, b0, a2)
    a3, b0, b1 = tl.where(two, b1, a3), tl.where(two, b2, b0), tl.where(two, b3, b1)
    b2, b3, c0 = tl.where(two, c0, b2), tl.where(two, c1, b3), tl.where(two, c2, c0)
    a0, a1, a2, a3 = (
        tl.where(one, a1, a0),
        tl.where(one, a2, a1),
        tl.where(one, a3, a2),
        tl.where(one, b0, a3),
    )
    b0, b1, b2, b3 = (
        tl.where(one, b1, b0),
        tl.where(one, b2, b1),
        tl.where(one, b3, b2),
        tl.where(one, c0, b3),
    )
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return _kept(tl.reshape(tl.join(even, odd), (count,)), dropped)


@triton.jit
def _kept(word, dropped: tl.constexpr):
    """Whether a word keeps its element: where all 2**32 are dropped, none does."""
    return word >= dropped if dropped < 4294967296 else word != word


@triton.jit
def _philox(seed, offset, quad):
    """Four words a quad: Philox4x32-7, as `autodiff.philox`."""
    k0, k1 = _words(seed)
    c0, c2 = _words(quad)
    c1, c3 = (c0 * 0 + offset).to(tl.uint32), c0 * 0
    for _ in tl.static_range(7):
        low_0, high_0 = product(c2, tl.full([], 0xCD9E8D57, tl.uint32))
        low_1, high_1 = product(c0, tl.full([], 0xD2511F53, tl.uint32))
        c0, c1, c2, c3 = high_0 ^ c1 ^ k0, low_0, high_1 ^ c3 ^ k1, low_1
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _words(number):
    """Low and high 32-bit words."""
    low = number.to(tl.uint32)
    if number.dtype == tl.int64:
        high = (number >> 32).to(tl.uint32)
    else:
        high = low * 0
    return low, high


@triton.jit
def _exp(x, COARSE: tl.constexpr):
    """exp(x) to an ulp, or within |x| ulps with a quarter of the arithmetic."""
    return libdevice.fast_expf(x) if COARSE else libdevice.exp(x)


@triton.jit
def _quotient(a, b, COARSE: tl.constexpr):
    """a / b to two ulps, or without scaling: as exact where |b| is at most 2**126, beyond it 0."""
    return libdevice.fast_dividef(a, b) if COARSE else a / b


@triton.jit
def sigmoid(x, COARSE: tl.constexpr):
    """1 / (1 + exp(-x)); below -87, where it is smaller than any normal number, it may be 0."""
    return _quotient(1.0, 1.0 + _exp(-x, COARSE), COARSE)


@triton.jit
def _sigmoids(x, COARSE: tl.constexpr):
    """sigmoid(x) and sigmoid(-x), neither by a difference, which would lose the smaller one.

    exp(-x) is kept finite, so that what the first one's reciprocal flushes to 0 makes the second 0
    rather than NaN: nothing that a derivative multiplies it with can bring it back.
    """
    if COARSE:
        small = _exp(tl.minimum(-x, 88.5), COARSE)
        upper = _quotient(1.0, 1.0 + small, COARSE)
        lower = small * upper
    else:
        small = libdevice.exp(-tl.abs(x))
        larger = 1.0 / (1.0 + small)
        smaller = small * larger
        upper = tl.where(x >= 0, larger, smaller)
        lower = tl.where(x >= 0, smaller, larger)
    return upper, lower


@triton.jit
def silu(x, COARSE: tl.constexpr):
    """x sigmoid(x)."""
    return _quotient(x, 1.0 + _exp(-x, COARSE), COARSE)


@triton.jit
def gelu_slope(x, COARSE: tl.constexpr):
    """Derivative of x Phi(x)."""
    cdf = 0.5 * (1.0 + libdevice.erf(x * 0.7071067811865476))
    return cdf + x * (_exp(-0.5 * x * x, COARSE) * 0.3989422804014327)


@triton.jit
def gelu_tanh(x, COARSE: tl.constexpr):
    """gelu's tanh form, 0.5 x (1 + tanh u), as x sigmoid(2u): the same, with less arithmetic."""
    twice = x * (1.5957691216057308 + 0.07135481627260025 * (x * x))
    return _quotient(x, 1.0 + _exp(-twice, COARSE), COARSE)


@triton.jit
def gelu_tanh_slope(x, COARSE: tl.constexpr):
    """Derivative of gelu's tanh form, with s = sigmoid(2u): s + 2 x s (1 - s) u'."""
    square = x * x
    twice = x * (1.5957691216057308 + 0.07135481627260025 * square)
    slope = 1.5957691216057308 + 0.21406444881780075 * square
    upper, lower = _sigmoids(twice, COARSE)
    return upper + x * (lower * upper) * slope


@triton.jit
def silu_slope(x, COARSE: tl.constexpr):
    """Derivative of x sigmoid(x)."""
    upper, lower = _sigmoids(x, COARSE)
    return upper * (1.0 + x * lower)


@triton.jit
def softplus_backward(grad, x, beta, threshold):
    """grad sigmoid(beta x), grad itself past the threshold."""
    z = libdevice.exp(x * beta)
    return tl.where(x * beta > threshold, grad, grad * z / (z + 1.0))


@triton.jit
def log_sigmoid_slope(x):
    """Derivative of log(sigmoid(x))."""
    z = libdevice.exp(-tl.abs(x))
    ratio = z / (1.0 + z)
    return tl.where(x < 0, 1.0 - ratio, ratio)


@triton.jit
def logit(x):
    """log(x / (1 - x))."""
    return libdevice.log(x / (1.0 - x))


@triton.jit
def xlogy(x, y):
    """x log(y), 0 where x is 0 and y is a number."""
    product = x * libdevice.log(y)
    return tl.where(y != y, y, tl.where(x == 0, 0.0, product))


@triton.jit
def row_key(index, base, ROWS: tl.constexpr, TOTAL: tl.constexpr, WRAP: tl.constexpr):
    """Row index + base of a scatter's result; TOTAL where the index is outside 0 .. ROWS-1."""
    row = tl.where(index < 0, index + ROWS, index) if WRAP else index
    return tl.where((row >= 0) & (row < ROWS), row + base, TOTAL)


@triton.jit
def lower_bound(keys, key, COUNT: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr):
    """How many of COUNT sorted keys are less, for each of a block; SPAN: 2^(STEPS-1) <= COUNT."""
    found = key * 0
    for step in range(STEPS):
        upto = found + (SPAN >> step)
        inside = upto <= COUNT
        other = tl.load(keys + upto - 1, mask=inside, other=0).to(tl.int32)
        found = tl.where(inside & (other < key), upto, found)
    return found


@triton.jit
def merge_moments(count, mean, m2, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Merge (count, mean, sum of squared deviations) along an axis; entries may be empty, or all.

    Source: Chan, Golub and LeVeque (1979).
    """
    total = reduce_sum(count, axis, keep_dims)
    merged = reduce_sum(count * mean, axis, keep_dims) / tl.maximum(total, 1.0)
    shift = mean - merged  # a merged mean without the axis is a scalar, and broadcasts
    return total, merged, reduce_sum(m2 + count * shift * shift, axis, keep_dims)


@triton.jit
def merge_equal_moments(count, mean, m2, axis: tl.constexpr, keep_dims: tl.constexpr):
    """The same, with no deviation where all means are equal: theirs from a mean of them is none."""
    total = reduce_sum(count, axis, keep_dims)
    merged = reduce_sum(count * mean, axis, keep_dims) / tl.maximum(total, 1.0)
    off = reduce_sum(count * (mean - merged), axis, keep_dims)
    merged = merged + tl.where(off - off == 0.0, off, 0.0) / tl.maximum(total, 1.0)  # inf stays
    shift = mean - merged
    return total, merged, reduce_sum(m2 + count * shift * shift, axis, keep_dims)


@triton.jit
def online_softmax(top, total, x, COARSE: tl.constexpr, keep_dims: tl.constexpr = False):
    """One chunk of a row into (maximum, sums of exp(x - maximum) a lane); keep_dims: of several.

    Empty so far: top = -inf, total = 0. Source: Milakov and Gimelshein, arXiv:1805.02867.
    """
    peak = maximum(top, reduce_max(x, 0, keep_dims))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, total * _exp(top - shift, COARSE) + _exp(x - shift, COARSE)


@triton.jit
def online_softmax_groups(top, total, x, COARSE: tl.constexpr, GROUP: tl.constexpr):
    """The same with a maximum for each GROUP of neighbours: a thread has those, and waits for none.

    top, total: one of each a group.
    """
    groups = tl.reshape(x, (x.shape[0] // GROUP, GROUP))
    peak = maximum(top, reduce_max(groups, 1, False))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    sums = reduce_sum(_exp(groups - shift[:, None], COARSE), 1, False)
    return peak, total * _exp(top - shift, COARSE) + sums


@triton.jit
def finish_softmax(top, total, keep_dims: tl.constexpr = False):
    """The row's sum from its lanes'; NaN for a row of -inf, as exp(-inf - -inf) is."""
    return nan_if_empty(top, reduce_sum(total, 0, keep_dims))


@triton.jit
def nan_if_empty(top, total):
    """A row's sum of exp(x - maximum); NaN for a row of -inf."""
    return tl.where(top == float("-inf"), float("nan"), total)


@triton.jit
def online_softmax_lanes(top, total, x, COARSE: tl.constexpr):
    """A tile into (maximum, sum of exp(x - maximum)), both a lane: none waits for another.

    Of the exponentials of old and new maximum one is of 0. Empty so far: top = -inf, total = 0.
    """
    above = tl.where(x == float("-inf"), float("-inf"), x - top)
    small = _exp(-tl.abs(above), COARSE)
    return maximum(top, x), tl.where(above > 0, total * small + 1.0, total + small)


@triton.jit
def join_softmax(top, total, keep_dims: tl.constexpr = False):
    """(maximum, sum) of lanes or parts in one, some or all of them empty."""
    peak = reduce_max(top, 0, keep_dims)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, reduce_sum(total * libdevice.exp(top - shift), 0, keep_dims)


@triton.jit
def load_row(pointers, place, stop, count: tl.constexpr, eviction_policy: tl.constexpr = None):
    """A block of a row in whole vectors, with what they have of other rows or lies after the last.

    place: of its lanes, from an aligned element at or before the row, which ends at stop.
    """
    # Triton moves vectors where it can tell that the lanes of one are masked alike
    end = (stop + count - 1) // count * count
    inside = (place >= 0) & (place < end)
    return tl.load(pointers, mask=inside, eviction_policy=eviction_policy)


@triton.jit
def store_row(
    pointers, x, place, start, stop, count: tl.constexpr, ends, eviction_policy: tl.constexpr = None
):
    """Write a block of a row: vectors that lie in it whole; ends: elements of the others, too."""
    first, end = (start + count - 1) // count * count, stop // count * count
    inside = (place >= first) & (place < end)
    tl.store(pointers, x, mask=inside, eviction_policy=eviction_policy)
    if ends:
        vector = place & -count  # equal for the lanes of a vector: compared once for all of them
        partial = (vector < start) | (vector + count > stop)
        tl.store(pointers, x, mask=partial & (place >= start) & (place < stop))
