"""Tests of the contract of codecs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from diloco.algorithm import Codec
from diloco.errors import CodecError, ContractError

__all__ = ["check_codec", "contract", "expect", "same_bits", "spread_values"]


@contextmanager
def contract(kind: str, value: object) -> Iterator[None]:
    """Convert every exception in a ``with`` block to a `ContractError` about ``value``, which is a ``kind``."""
    try:
        yield
    except ContractError as broken:
        raise ContractError(f"{kind} {type(value).__name__}: {broken}") from broken
    except Exception as error:
        raise ContractError(f"{kind} {type(value).__name__} raised {_sentence(error)}") from error


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Convert every exception in a ``with`` block to a `ContractError` that says of which call on which input it is."""
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        raise ContractError(f"{what} raised {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}."


def expect(kept: bool, broken: str) -> None:
    """Raise `ContractError` with the clause ``broken``, without a full stop, unless ``kept``."""
    if not kept:
        raise ContractError(f"{broken}.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two float32 tensors have equal bits, including the signs of zeros and the payloads of NaNs."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


_LARGEST, _LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def check_codec(make: Callable[[], Codec], *, sizes: Sequence[int] | None = None) -> None:
    """Raise unless the codecs that ``make`` returns keep the contract of `Codec`. Takes some hundredths of a second.

    The codec must encode equal values to equal bytes in every instance, in exactly `payload_bytes`. Every payload that
    it accepts must decode to finite values. It must accumulate exactly what it decodes, cut payloads between blocks,
    and refuse tensors that do not fit. The quantisation error is not tested.

    Args:
        make: Returns a new codec on each call.
        sizes: The numbers of values to test, in addition to 0 to 3. Default: around one and several blocks.

    Raises:
        ContractError: if the contract is broken. The message says how.
    """
    codec, other = make(), make()
    with contract("codec", codec):
        expect(isinstance(codec, Codec), "it is not a diloco.Codec")
        expect(isinstance(getattr(codec, "name", None), str), "its name is not a string")
        block = codec.block_size
        expect(isinstance(block, int) and block >= 1, f"block_size is {block!r}; it must be an int of at least 1")
        described = all(isinstance(value, int | float | str | bool) for value in codec.parameters().values())
        expect(described, "parameters() has values other than numbers and strings, which replicas can't compare")
        for size in dict.fromkeys([0, 1, 2, 3, *(sizes or (block - 1, block, block + 1, 3 * block + 7, 257))]):
            values = spread_values(size)
            payload = _check_payload(codec, values)
            with _naming(f"encode of {_described(values)}, by another instance,"):
                expect(torch.equal(other.encode(values), payload), f"two instances encode {size} values differently")
        _check_random_bytes(codec, 2 * block + 3)
        _check_refusals(codec, block + 1)


def _check_payload(codec: Codec, values: Tensor, weight: float = 0.3) -> Tensor:
    """Check encoding, decoding, accumulating and cutting of ``values``; return the payload."""
    name, numel = _described(values), values.numel()
    before = values.detach().clone()
    with _naming(f"encode of {name}"):
        payload = codec.encode(values)
        expected = (codec.payload_bytes(numel),)
    expect(tuple(payload.shape) == expected, f"{name}: the payload is {tuple(payload.shape)}, not {expected}")
    expect(same_bits(values.detach(), before), f"{name}: encode changed them")
    again = codec.encode(values)
    expect(torch.equal(again, payload), f"{name}: encoding them again gives different bytes")
    again.fill_(255)
    expect(same_bits(values.detach(), before), f"{name}: the payload shares their memory")
    with _naming(f"validate of the payload of {name}"):
        codec.validate(payload, numel)
    with _naming(f"decode of {name}"):
        decoded = codec.decode(payload, numel)
    expect(bool(decoded.isfinite().all()), f"{name}: the decoded values are not finite")
    expect(not decoded.requires_grad, f"{name}: the decoded values require gradients")
    out = torch.full_like(decoded, math.nan)
    expect(codec.decode(payload, numel, out) is out, f"{name}: decode does not return `out`")
    expect(same_bits(out, decoded), f"{name}: decode to `out` leaves values unwritten or gives different ones")
    with _naming(f"accumulate of {name}"):
        _check_sum(codec, payload, decoded, weight, name)
    message = torch.cat([payload.new_zeros(3), payload])[3:]  # unaligned, as in a larger message
    with _naming(f"the payload of {name} at an odd address"):
        unaligned = codec.decode(message, numel)
        expect(same_bits(unaligned, decoded), f"{name}: the payload at an odd address decodes to different values")
    for start, stop in _ranges(codec, numel):
        with _naming(f"cut({start}, {stop}) of {name}"):
            part, length = codec.cut(message, numel, start, stop), stop - start
            expect(
                torch.equal(part, codec.encode(values[start:stop])),
                f"{name}: cut({start}, {stop}) differs from the payload of these values",
            )
            codec.validate(part, length)
            alike = same_bits(codec.decode(part, length), decoded[start:stop])
            expect(alike, f"{name}: cut({start}, {stop}) decodes to different values")
            _check_sum(codec, part, decoded[start:stop], weight, name)
    return payload


def _described(values: Tensor) -> str:
    """Name an input of a codec by its number of values and the largest of them."""
    return f"{values.numel()} values" + (f" up to {float(values.detach().abs().max()):.3g}" if len(values) else "")


def spread_values(numel: int, seed: int = 0) -> Tensor:
    """Return ``(numel,)`` float32 of many magnitudes, including both zeros, subnormals and the largest values."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = _normal(numel, generator) * torch.exp2(_normal(numel, generator) * 8)
    corners = values.new_tensor([0.0, -0.0, 1e-45, -1e-40, _LEAST, _LARGEST, -_LARGEST, 1.5, -0.75, 65519.0])
    values[::13] = corners.repeat(numel // (13 * len(corners)) + 1)[: len(values[::13])]
    return values


def _normal(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, dtype=torch.float32, device="cpu", generator=generator)


def _check_sum(codec: Codec, payload: Tensor, decoded: Tensor, weight: float, name: str) -> None:
    """Check ``out += weight * decoded``, where each product must be rounded before the addition."""
    out = spread_values(len(decoded), seed=1).abs_().clamp_(1e-3, 1e30)  # no zeros: their sign may be left unchanged
    expected = out + decoded * weight
    codec.accumulate(payload, out, weight)
    expect(same_bits(out, expected), f"{name}: accumulate does not add weight * decode(payload) with two roundings")


def _check_random_bytes(codec: Codec, numel: int) -> None:
    """Check payloads in which all, some or few bytes are random."""
    generator, size = torch.Generator("cpu").manual_seed(2), codec.payload_bytes(numel)
    for attempt in range(40):
        payload = codec.encode(_normal(numel, generator))
        drawn = torch.randint(0, 256, (size,), dtype=torch.int64, device="cpu", generator=generator).to(torch.uint8)
        share = (1.0, 0.2, 3 / max(1, size))[attempt % 3]
        changed = torch.rand(size, dtype=torch.float32, device="cpu", generator=generator) < share
        _check_bytes(codec, torch.where(changed, drawn, payload), numel)


def _check_bytes(codec: Codec, payload: Tensor, numel: int) -> None:
    """Check that arbitrary bytes are refused or decode to finite values, as a whole and in parts."""
    with _naming(f"a payload of {numel} values with random bytes"):
        refused = _refused(codec, payload, numel)
        parts = [(codec.cut(payload, numel, start, stop), stop - start) for start, stop in _ranges(codec, numel)]
        alike = refused == any(_refused(codec, part, length) for part, length in parts)
        expect(alike, "validate refuses bytes as a whole and accepts all their parts, or the reverse")
        if not refused:
            fine = bool(codec.decode(payload, numel).isfinite().all())
            expect(fine, "validate accepts bytes that decode to NaN or infinity")


def _ranges(codec: Codec, numel: int) -> Iterator[tuple[int, int]]:
    """Return four ranges: an empty one, two halves of the whole blocks, and the values of a shorter last block."""
    whole = numel // codec.block_size
    return pairwise([0, 0, whole // 2 * codec.block_size, whole * codec.block_size, numel])


def _refused(codec: Codec, payload: Tensor, numel: int) -> bool:
    try:
        codec.validate(payload, numel)
    except CodecError:
        return True
    except Exception as error:
        raise ContractError(
            f"validate raised {type(error).__name__} for arbitrary bytes; it may only raise CodecError: {error}"
        ) from error
    return False


def _malformed(good: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "a payload that is too short", good[:-1]
    yield "a payload that is too long", torch.cat([good, good[:1]])
    yield "no payload", good[:0]
    yield "a payload of int8", good.view(torch.int8)
    yield "a payload of two dimensions", good.unsqueeze(0)
    yield "a strided payload", good.repeat_interleave(2)[::2]


def _check_refusals(codec: Codec, numel: int) -> None:
    ones = torch.ones(numel, dtype=torch.float32, device="cpu")
    with _naming(f"encode of {_described(ones)}"):
        good = codec.encode(ones)
    for what, payload in _malformed(good):
        out = torch.full_like(ones, 7.0)
        _must_refuse(f"validate accepts {what}", codec.validate, payload, numel)
        _must_refuse(f"cut accepts {what}", codec.cut, payload, numel, 0, numel)
        _must_refuse(f"decode accepts {what}", codec.decode, payload, numel, out)
        _must_refuse(f"accumulate accepts {what}", codec.accumulate, payload, out)
        expect(bool((out == 7).all()), f"{what} was refused only after values had been written")
    for what, values in (
        ("float64 values", ones.new_zeros(3, dtype=torch.float64)),
        ("a matrix", ones.new_zeros(2, 3)),
        ("strided values", ones.new_zeros(6)[::2]),
    ):
        _must_refuse(f"encode accepts {what}", codec.encode, values)
    for what, out in (
        ("too long", ones.new_zeros(numel + 1)),
        ("of float64", ones.to(torch.float64)),
        ("strided", ones.new_zeros(2 * numel)[::2]),
        ("on another device", ones.to("meta")),
    ):
        _must_refuse(f"decode writes to an `out` that is {what}", codec.decode, good, numel, out)
    size = codec.block_size
    bounds = [(-size, size), (size, 0), (0, numel + size), *([(1, size), (0, size - 1)] if size > 1 else [])]
    for start, stop in bounds:
        _must_refuse(f"cut accepts {start} to {stop}", codec.cut, good, numel, start, stop)


def _must_refuse(what: str, method: Callable[..., object], *arguments: object) -> None:
    try:
        method(*arguments)
    except CodecError:
        return
    except Exception as error:
        raise ContractError(f"{what}, then raises {type(error).__name__}; it must raise CodecError.") from error
    raise ContractError(f"{what}; it must raise CodecError.")
