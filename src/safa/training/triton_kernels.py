"""Convolutions of many clients in Triton: matrix products whose windows are read from where they are.

Channels lie innermost in memory, so that a row of a window is a run of numbers. A program computes a tile of one
client's result. In single precision, operands are split into two parts of 11 bits and multiplied three times on tensor
cores, with an error about that of single precision; where torch may use TF32, once. The sizes of tiles were found by
measuring on an H200.

C, H and W are channels, rows and columns of the input, O, OH and OW those of the output, KH and KW the size of a
window, SH and SW the stride, PH and PW the padding. A tile has BP pixels, BO filters, and BR places of a window.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward", "pool", "unpool"]


@triton.jit
def _forward_kernel(
    x, w, bias, out, x_stride, w_stride, bias_stride, images,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BY_ROWS: tl.constexpr, INSIDE: tl.constexpr, RUN: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A tile of pixels x filters of the output of one client.

    BY_ROWS: its pixels are of one row in several images, so that rows of windows outside of the image are left out.
    INSIDE: no window reaches beyond the image.
    """
    client = tl.program_id(2).to(tl.int64)
    x += client * x_stride
    w += client * w_stride
    out += client * images * (OH * OW * O)
    length: tl.constexpr = KW * C
    acc = tl.zeros((BP, BO), tl.float32)
    if BY_ROWS:
        row = tl.program_id(1) % OH
        o = tl.program_id(1) // OH * BO + tl.arange(0, BO)
        q = tl.program_id(0) * BP + tl.arange(0, BP)
        known = q < images * OW
        p = (q // OW * OH + row) * OW + q % OW
        y0, x0 = row * SH - PH, (q % OW * SW - PW) * C
        base = q // OW * (H * W * C) + x0
        blocks: tl.constexpr = (length + BR - 1) // BR
        for t in range(tl.maximum(-y0, 0) * blocks, tl.minimum(KH, H - y0) * blocks):
            i, k = t // blocks, t % blocks * BR + tl.arange(0, BR)
            mask = known[:, None] & (k < length)[None, :]
            if not INSIDE:
                mask &= (x0[:, None] + k[None, :] >= 0) & (x0[:, None] + k[None, :] < W * C)
            windows = tl.load(x + base[:, None] + ((y0 + i) * (W * C) + k)[None, :], mask=mask, other=0.0)
            place = o[None, :] * (KH * length) + (i * length + k)[:, None]
            filters = tl.load(w + place, mask=(o < O)[None, :] & (k < length)[:, None], other=0.0)
            acc = tl.dot(windows, filters, acc, input_precision=PRECISION)
    else:
        o = tl.program_id(1) * BO + tl.arange(0, BO)
        p = tl.program_id(0) * BP + tl.arange(0, BP)
        known = p < images * (OH * OW)
        y0, x0 = p // OW % OH * SH - PH, (p % OW * SW - PW) * C
        base = p // (OH * OW) * (H * W * C) + y0 * (W * C) + x0
        for first in range(0, KH * length, BR):
            r = first + tl.arange(0, BR)
            i, k = r // length, r % length
            mask = known[:, None] & (r < KH * length)[None, :]
            if not INSIDE:
                mask &= (y0[:, None] + i[None, :] >= 0) & (y0[:, None] + i[None, :] < H)
                mask &= (x0[:, None] + k[None, :] >= 0) & (x0[:, None] + k[None, :] < W * C)
            offset = tl.multiple_of(tl.max_contiguous(i * (W * C) + k, RUN), RUN)
            windows = tl.load(x + base[:, None] + offset[None, :], mask=mask, other=0.0)
            place = o[None, :] * (KH * length) + r[:, None]
            filters = tl.load(w + place, mask=(o < O)[None, :] & (r < KH * length)[:, None], other=0.0)
            acc = tl.dot(windows, filters, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + client * bias_stride + o, mask=o < O, other=0.0)[None, :]
    tl.store(out + (p * O)[:, None] + o[None, :], acc, mask=known[:, None] & (o < O)[None, :])


@triton.jit
def _fold_kernel(
    columns, out, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of pixels x channels: the sums of what all windows hold of a pixel; the stride is 1."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    image, y, x = p // (H * W), (p // W % H).to(tl.int32), (p % W).to(tl.int32)
    acc = tl.zeros((BP, BC), tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            row, column = y + PH - i, x + PW - j
            known = (p < pixels) & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
            place = ((image * OH + row) * OW + column) * (KH * KW * C) + (i * KW + j) * C
            acc += tl.load(columns + place[:, None] + c[None, :], mask=known[:, None] & (c < C)[None, :], other=0.0)
    tl.store(out + (p * C)[:, None] + c[None, :], acc, mask=(p < pixels)[:, None] & (c < C)[None, :])


@triton.jit
def _rounded(values, PRECISION: tl.constexpr):
    """Values rounded to the 11 bits of TF32, where that is the precision: it makes for a faster product."""
    if PRECISION == "tf32":
        bits = values.to(tl.int32, bitcast=True)
        values = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _weight_kernel(
    g, x, out, out_bias, x_stride, pixels, per_split,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr, INSIDE: tl.constexpr, RUN: tl.constexpr,
    BO: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A tile of filters x places in a window of the gradient for one client's filters, from some of its pixels."""
    client = tl.program_id(2).to(tl.int64)
    g += client * pixels * O
    x += client * x_stride
    length: tl.constexpr = KW * C
    tiles: tl.constexpr = (KH * length + BR - 1) // BR
    r = tl.program_id(0) % tiles * BR + tl.arange(0, BR)
    i, k = r // length, r % length
    o = tl.program_id(0) // tiles * BO + tl.arange(0, BO)
    offset = tl.multiple_of(tl.max_contiguous(i * (W * C) + k, RUN), RUN)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, pixels)
    acc = tl.zeros((BR, BO), tl.float32)
    total = tl.zeros((BO,), tl.float32)
    for step in range(0, per_split, BP):
        p = begin + step + tl.arange(0, BP)
        y0, x0 = p // OW % OH * SH - PH, (p % OW * SW - PW) * C
        mask = (p < end)[:, None] & (r < KH * length)[None, :]
        if not INSIDE:
            mask &= (y0[:, None] + i[None, :] >= 0) & (y0[:, None] + i[None, :] < H)
            mask &= (x0[:, None] + k[None, :] >= 0) & (x0[:, None] + k[None, :] < W * C)
        base = p // (OH * OW) * (H * W * C) + y0 * (W * C) + x0
        windows = _rounded(tl.load(x + base[:, None] + offset[None, :], mask=mask, other=0.0), PRECISION)
        slopes = tl.load(g + p[:, None] * O + o[None, :], mask=(p < end)[:, None] & (o < O)[None, :], other=0.0)
        acc = tl.dot(tl.trans(windows), _rounded(slopes, PRECISION), acc, input_precision=PRECISION)
        total += tl.sum(slopes, 0)
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(2) + client
    part = out + place * (O * KH * length) + o[:, None] * (KH * length) + r[None, :]
    tl.store(part, tl.trans(acc), mask=(o < O)[:, None] & (r < KH * length)[None, :])
    if tl.program_id(0) % tiles == 0:
        tl.store(out_bias + place * O + o, total, mask=o < O)


_PROGRAMS = 1000  # enough to fill a GPU
_MOST_WASTE = 2.0  # of the products of a gradient for the input; where more were wasted, windows are laid out instead


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def _tile(count: int, most: int) -> int:
    """The power of two that holds so many, from 16 to `most`."""
    return min(most, max(16, 1 << (count - 1).bit_length()))


def _run_length(channels: int) -> int:
    """How many places of a window are surely neighbours in memory."""
    return 4 if channels % 4 == 0 else 2 if channels % 2 == 0 else 1


def _innermost(x: Tensor) -> Tensor:
    """[K, ., C, H, W] as [K, ., H, W, C], contiguous but for the first dimension."""
    moved = x.movedim(2, 4)
    return moved if moved[0].is_contiguous() else moved.contiguous()


def _sizes(x: Tensor, out: Tensor, kernel: tuple[int, ...], stride: list[int], padding: list[int]) -> dict[str, int]:
    """The sizes of a convolution from [K, B, H, W, C] to [K, B, H', W', O], as kernels call them."""
    h, w, c = x.shape[2:]
    oh, ow, o = out.shape[2:]
    names = ("C", "H", "W", "O", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW")
    return dict(zip(names, (c, h, w, o, oh, ow, *kernel, *stride, *padding), strict=True))


def _is_inside(s: dict[str, int]) -> bool:
    """Whether all windows lie within the image."""
    reach = {d: (s[f"O{d}"] - 1) * s[f"S{d}"] + s[f"K{d}"] for d in "HW"}
    return s["PH"] == s["PW"] == 0 and all(reach[d] <= s[d] for d in "HW")


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, stride: list[int], padding: list[int]) -> None:
    """Convolve [K, B, H, W, C] with filters [K, O, h, w, C] into [K, B, H', W', O]."""
    s = _sizes(x, out, tuple(w.shape[2:4]), stride, padding)
    clients, images = x.shape[:2]
    inside, precision, places = _is_inside(s), _precision(), s["KH"] * s["KW"] * s["C"]
    by_rows = not inside and s["KW"] * s["C"] >= 16
    if precision == "tf32":
        bp, br, warps, stages = (128, 16, 4, 4) if by_rows and s["O"] <= 32 else (128, 32, 4, 3)
    else:
        bp, br, warps, stages = (256, 16, 8, 3) if inside and places > 32 else (128, 32, 8 if by_rows else 4, 3)
    along = images * s["OW"] * (1 if by_rows else s["OH"])
    bp, bo, br = _tile(along, bp), _tile(s["O"], 64), _tile(s["KW"] * s["C"] if by_rows else places, br)
    grid = triton.cdiv(along, bp), triton.cdiv(s["O"], bo) * (s["OH"] if by_rows else 1), clients
    _forward_kernel[grid](
        x, w, bias, out, x.stride(0), w.stride(0), 0 if bias is None else bias.stride(0), images, **s,
        HAS_BIAS=bias is not None, PRECISION=precision, BY_ROWS=by_rows, INSIDE=inside, RUN=_run_length(s["C"]),
        BP=bp, BO=bo, BR=br, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...], stride: list[int], padding: list[int]
) -> Tensor:
    """The output of this shape, [K, B, O, H', W'], with the channels innermost in memory."""
    clients, images, o, oh, ow = shape
    out = x.new_empty(clients, images, oh, ow, o)
    _convolve(_innermost(x), _innermost(weight), bias, out, stride, padding)
    return out.movedim(4, 2)


def backward(
    slope: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], *, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for input, filters and biases."""
    slope = _innermost(slope).contiguous()
    for_x = _input_gradient(slope, weight, tuple(x.shape), stride, padding) if needs_x else x.new_empty(0)
    return for_x, *_weight_gradient(slope, _innermost(x), (weight.shape[3], weight.shape[4]), stride, padding)


def _input_gradient(
    slope: Tensor, weight: Tensor, shape: tuple[int, ...], stride: list[int], padding: list[int]
) -> Tensor:
    """The gradient for an input of this shape: a convolution of the slopes with the filters turned round."""
    clients, images, c, h, w = shape
    out = slope.new_empty(clients, images, h, w, c)
    if stride == [1, 1] and _precision() != "tf32" and _waste(slope, out) > _MOST_WASTE:
        _fold(slope, weight, out, padding)
        return out.movedim(4, 2)
    turned = weight.flip(3, 4).permute(0, 2, 3, 4, 1).contiguous()  # [K, C, h, w, O]
    _convolve(_spread(slope, stride), turned, None, out, [1, 1], [weight.shape[3 + d] - 1 - padding[d] for d in (0, 1)])
    return out.movedim(4, 2)


def _waste(slope: Tensor, out: Tensor) -> float:
    """How many times the necessary products there are: with zeros beyond the border, and of tiles that are not full."""
    (oh, ow, _), (h, w, c) = slope.shape[2:], out.shape[2:]
    return max(1.0, h * w / (oh * ow)) * max(1.0, _tile(c, 64) / c)


def _spread(slope: Tensor, stride: list[int]) -> Tensor:
    """Slopes with zeros between them, as many as a stride leaves out."""
    if stride == [1, 1]:
        return slope
    clients, images, oh, ow, o = slope.shape
    spread = slope.new_zeros(clients, images, (oh - 1) * stride[0] + 1, (ow - 1) * stride[1] + 1, o)
    spread[:, :, :: stride[0], :: stride[1]] = slope
    return spread


def _fold(slope: Tensor, weight: Tensor, out: Tensor, padding: list[int]) -> None:
    """The gradient for the input by way of those for all windows."""
    clients, o, _, kh, kw = weight.shape
    _, images, h, w, c = out.shape
    flat = weight.permute(0, 1, 3, 4, 2).reshape(clients, o, -1)
    columns = torch.bmm(slope.view(clients, -1, o), flat)
    pixels, bc = clients * images * h * w, _tile(c, 64)
    _fold_kernel[(triton.cdiv(pixels, 64), triton.cdiv(c, bc))](
        columns, out, pixels, C=c, H=h, W=w, OH=slope.shape[2], OW=slope.shape[3], KH=kh, KW=kw,
        PH=padding[0], PW=padding[1], BP=64, BC=bc, num_warps=4,
    )  # fmt: skip


def _weight_gradient(
    slope: Tensor, x: Tensor, kernel: tuple[int, int], stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients for filters [K, O, C, h, w] and biases [K, O]; pixels are split where there are few tiles."""
    s = _sizes(x, slope, kernel, stride, padding)
    clients, images = x.shape[:2]
    pixels, places = images * s["OH"] * s["OW"], s["KH"] * s["KW"] * s["C"]
    bo, br = _tile(s["O"], 64), _tile(places, 128)
    bp = 64 if br <= 32 else 32
    tiles = triton.cdiv(places, br) * triton.cdiv(s["O"], bo)
    splits = max(1, min(triton.cdiv(_PROGRAMS, tiles * clients), pixels // (8 * bp)))
    per_split = triton.cdiv(triton.cdiv(pixels, splits), bp) * bp
    splits = triton.cdiv(pixels, per_split)
    out = x.new_empty(splits, clients, s["O"], s["KH"], s["KW"], s["C"])
    total = x.new_empty(splits, clients, s["O"])
    _weight_kernel[(tiles, splits, clients)](
        slope, x, out, total, x.stride(0), pixels, per_split, **s, PRECISION=_precision(), INSIDE=_is_inside(s),
        RUN=_run_length(s["C"]), BO=bo, BR=br, BP=bp, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.sum(0).movedim(4, 2).contiguous(), total.sum(0)


@triton.jit
def _pool_kernel(
    x, out, places, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of windows x channels: the largest value of each, and its place; the first of equal ones."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (p < pixels)[:, None] & (c < C)[None, :]
    base = (p // (OH * OW) * H + p // OW % OH * KH) * W + p % OW * KW
    largest = tl.full((BP, BC), float("-inf"), tl.float32)
    place = tl.zeros((BP, BC), tl.int32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            value = tl.load(x + ((base + i * W + j) * C)[:, None] + c[None, :], mask=mask, other=0.0)
            larger = (value > largest) | (value != value)
            largest = tl.where(larger, value, largest)
            place = tl.where(larger, i * KW + j, place)
    tl.store(out + (p * C)[:, None] + c[None, :], largest, mask=mask)
    tl.store(places + (p * C)[:, None] + c[None, :], place.to(tl.uint8), mask=mask)


@triton.jit
def _unpool_kernel(
    slope, places, out, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of pixels x channels of the input: the slope of its window where it is the largest there, 0 elsewhere."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (p < pixels)[:, None] & (c < C)[None, :]
    y, x = p // W % H, p % W
    pooled = (p < pixels) & (y // KH < OH) & (x // KW < OW)
    window = ((p // (H * W) * OH + y // KH) * OW + x // KW) * C
    known = pooled[:, None] & (c < C)[None, :]
    place = tl.load(places + window[:, None] + c[None, :], mask=known, other=255)
    value = tl.load(slope + window[:, None] + c[None, :], mask=known, other=0.0)
    mine = place == (y % KH * KW + x % KW)[:, None]
    tl.store(out + (p * C)[:, None] + c[None, :], tl.where(mine, value, 0.0), mask=mask)


def pool(x: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    """The largest value of every window [K, B, C, H', W'] and its place; windows lie side by side."""
    x = _innermost(x).contiguous()
    clients, images, h, w, c = x.shape
    oh, ow = h // kernel[0], w // kernel[1]
    out = x.new_empty(clients, images, oh, ow, c)
    places = torch.empty_like(out, dtype=torch.uint8)
    _over_pixels(_pool_kernel, (x, out, places), clients * images * oh * ow, (c, h, w, oh, ow, *kernel))
    return out.movedim(4, 2), places.movedim(4, 2)


def unpool(slope: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    """The gradient for an input of this height and width."""
    slope, places = _innermost(slope).contiguous(), _innermost(places).contiguous()
    clients, images, oh, ow, c = slope.shape
    out = slope.new_empty(clients, images, *size, c)
    _over_pixels(
        _unpool_kernel, (slope, places, out), clients * images * size[0] * size[1], (c, *size, oh, ow, *kernel)
    )
    return out.movedim(4, 2)


def _over_pixels(kernel: Any, tensors: tuple[Tensor, ...], pixels: int, sizes: tuple[int, ...]) -> None:
    """Run a kernel over tiles of pixels x channels."""
    names = ("C", "H", "W", "OH", "OW", "KH", "KW")
    bc = _tile(sizes[0], 64)
    grid = triton.cdiv(pixels, 64), triton.cdiv(sizes[0], bc)
    kernel[grid](*tensors, pixels, **dict(zip(names, sizes, strict=True)), BP=64, BC=bc, num_warps=4)
