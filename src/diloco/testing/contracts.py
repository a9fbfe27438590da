"""Tests of the contracts of codecs, outer optimizers, average rules, merge rules and inner optimizers."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from diloco.algorithm import AverageRule, Codec, MergeRule, OuterOptimizer, OuterState
from diloco.errors import CodecError, ContractError

_SIZE = 1001  # number of values of a test
_LARGEST, _LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in the exceptions of a ``with`` block what they are about, and make them `ContractError`."""
    try:
        yield
    except ContractError as error:
        raise ContractError(f"{what}: {error}") from error
    except Exception as error:
        raise ContractError(f"{what} raised {type(error).__name__}: {str(error).rstrip('.')}.") from error


def expect(kept: bool, broken: str) -> None:
    """Raise `ContractError` with the clause ``broken``, without a full stop, unless ``kept``."""
    if not kept:
        raise ContractError(f"{broken}.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two float32 tensors have equal bits, including the signs of zeros and the payloads of NaNs."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_codec(make: Callable[[], Codec], *, sizes: Sequence[int] | None = None) -> None:
    """Raise `ContractError` unless the codecs that ``make`` returns keep the contract of `Codec`.

    The codec must encode equal values to equal bytes in every instance, in exactly `payload_bytes`. Every payload that
    it accepts must decode to finite values. It must accumulate exactly what it decodes, cut payloads between blocks,
    and refuse tensors that do not fit. The quantisation error is not tested. Takes some hundredths of a second.

    Args:
        make: Returns a new codec on each call.
        sizes: The numbers of values to test, in addition to 0 to 3. Default: around one and several blocks.
    """
    codec, other = make(), make()
    with _naming(f"codec {type(codec).__name__}"):
        expect(isinstance(codec, Codec), "it is not a diloco.Codec")
        expect(isinstance(getattr(codec, "name", None), str), "its name is not a string")
        block = codec.block_size
        expect(isinstance(block, int) and block >= 1, f"block_size is {block!r}; it must be an int of at least 1")
        described = all(isinstance(value, int | float | str | bool) for value in codec.parameters().values())
        expect(described, "parameters() has values other than numbers and strings, which replicas can't compare")
        for size in dict.fromkeys([0, 1, 2, 3, *(sizes or (block - 1, block, block + 1, 3 * block + 7, 257))]):
            values = spread_values(size)
            payload = _check_payload(codec, values)
            expect(torch.equal(other.encode(values), payload), f"two instances encode {size} values differently")
        _check_random_bytes(codec, 2 * block + 3)
        _check_refusals(codec, block + 1)


def _check_payload(codec: Codec, values: Tensor) -> Tensor:
    """Check encoding, decoding, accumulating and cutting of ``values``; return the payload."""
    name, numel, before = _described(values), values.numel(), values.detach().clone()
    with _naming(f"encode of {name}"):
        payload = codec.encode(values)
        expected = (codec.payload_bytes(numel),)
        expect(tuple(payload.shape) == expected, f"the payload is {tuple(payload.shape)}, not {expected}")
        expect(same_bits(values.detach(), before), "encode changed them")
        again = codec.encode(values)
        expect(torch.equal(again, payload), "encoding them again gives different bytes")
        again.fill_(255)
        expect(same_bits(values.detach(), before), "the payload shares their memory")
    with _naming(f"validate of the payload of {name}"):
        codec.validate(payload, numel)
    with _naming(f"decode of {name}"):
        decoded = codec.decode(payload, numel)
        expect(not decoded.requires_grad, "the decoded values require gradients")
        out = torch.full_like(decoded, math.nan)
        expect(codec.decode(payload, numel, out) is out, "it does not return `out`")
        expect(same_bits(out, decoded), "into `out`, it leaves values unwritten or gives different ones")
        expect(bool(decoded.isfinite().all()), "the decoded values are not finite")
    with _naming(f"accumulate of {name}"):
        _check_sum(codec, payload, decoded)
    message = torch.cat([payload.new_zeros(3), payload])[3:]  # unaligned, as in a larger message
    with _naming(f"the payload of {name} at an odd address"):
        expect(same_bits(codec.decode(message, numel), decoded), "it decodes to different values")
    for start, stop in _ranges(codec, numel):
        with _naming(f"cut({start}, {stop}) of {name}"):
            part, length = codec.cut(message, numel, start, stop), stop - start
            expect(torch.equal(part, codec.encode(values[start:stop])), "it differs from the payload of these values")
            codec.validate(part, length)
            expect(same_bits(codec.decode(part, length), decoded[start:stop]), "it decodes to different values")
            _check_sum(codec, part, decoded[start:stop])
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


def _normal(shape: int | torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)


def _check_sum(codec: Codec, payload: Tensor, decoded: Tensor, weight: float = 0.3) -> None:
    """Check ``out += weight * decoded``, where each product must be rounded before the addition."""
    out = spread_values(len(decoded), seed=1).abs_().clamp_(1e-3, 1e30)  # no zeros: their sign may be left unchanged
    expected = out + decoded * weight
    codec.accumulate(payload, out, weight)
    expect(same_bits(out, expected), "accumulate does not add weight * decode(payload) with two roundings")


def _check_random_bytes(codec: Codec, numel: int) -> None:
    """Check that payloads with random bytes are refused or decode to finite values, as a whole and in parts."""
    generator, size = torch.Generator("cpu").manual_seed(2), codec.payload_bytes(numel)
    for attempt in range(40):
        payload = codec.encode(_normal(numel, generator))
        drawn = torch.randint(0, 256, (size,), dtype=torch.int64, device="cpu", generator=generator).to(torch.uint8)
        share = (1.0, 0.2, 3 / max(1, size))[attempt % 3]
        changed = torch.rand(size, dtype=torch.float32, device="cpu", generator=generator) < share
        payload = torch.where(changed, drawn, payload)
        with _naming(f"a payload of {numel} values with random bytes"):
            refused = _refuses("validate of arbitrary bytes", codec.validate, payload, numel)
            parts = [(codec.cut(payload, numel, start, stop), stop - start) for start, stop in _ranges(codec, numel)]
            alike = refused == any([_refuses("validate of a part", codec.validate, *part) for part in parts])
            expect(alike, "validate refuses bytes as a whole and accepts all their parts, or the reverse")
            if not refused:
                fine = bool(codec.decode(payload, numel).isfinite().all())
                expect(fine, "validate accepts bytes that decode to NaN or infinity")


def _ranges(codec: Codec, numel: int) -> Iterator[tuple[int, int]]:
    """Return four ranges: an empty one, two halves of the whole blocks, and the values of a shorter last block."""
    whole = numel // codec.block_size
    return pairwise([0, 0, whole // 2 * codec.block_size, whole * codec.block_size, numel])


def _refuses(what: str, method: Callable[..., object], *arguments: object) -> bool:
    try:
        method(*arguments)
    except CodecError:
        return True
    except Exception as error:
        raise ContractError(f"{what} raised {type(error).__name__}; it may only raise CodecError: {error}") from error
    return False


def _check_refusals(codec: Codec, numel: int) -> None:
    ones, size = torch.ones(numel, dtype=torch.float32, device="cpu"), codec.block_size

    def must_refuse(what: str, method: Callable[..., object], *arguments: object) -> None:
        expect(_refuses(what, method, *arguments), f"{what}; it must raise CodecError")

    good = codec.encode(ones)
    for what, payload in {
        "a payload that is too short": good[:-1],
        "a payload that is too long": torch.cat([good, good[:1]]),
        "no payload": good[:0],
        "a payload of int8": good.view(torch.int8),
        "a payload of two dimensions": good.unsqueeze(0),
        "a strided payload": good.repeat_interleave(2)[::2],
    }.items():
        out = torch.full_like(ones, 7.0)
        must_refuse(f"validate accepts {what}", codec.validate, payload, numel)
        must_refuse(f"cut accepts {what}", codec.cut, payload, numel, 0, numel)
        must_refuse(f"decode accepts {what}", codec.decode, payload, numel, out)
        must_refuse(f"accumulate accepts {what}", codec.accumulate, payload, out)
        expect(bool((out == 7).all()), f"{what} was refused only after values had been written")
    must_refuse("encode accepts float64 values", codec.encode, ones.new_zeros(3, dtype=torch.float64))
    must_refuse("encode accepts a matrix", codec.encode, ones.new_zeros(2, 3))
    must_refuse("encode accepts strided values", codec.encode, ones.new_zeros(6)[::2])
    for what, out in {
        "too long": ones.new_zeros(numel + 1),
        "of float64": ones.to(torch.float64),
        "strided": ones.new_zeros(2 * numel)[::2],
        "on another device": ones.to("meta"),
    }.items():
        must_refuse(f"decode writes to an `out` that is {what}", codec.decode, good, numel, out)
    for start, stop in ((-size, size), (size, 0), (0, numel + size), *([(1, size), (0, size - 1)] if size > 1 else [])):
        must_refuse(f"cut accepts {start} to {stop}", codec.cut, good, numel, start, stop)


def check_outer_optimizer(outer: OuterOptimizer) -> None:
    """Raise `ContractError` unless ``outer`` keeps the contract of `OuterOptimizer`.

    Its state must consist of a step and float32 vectors as long as the parameters, so that it can be copied, sent and
    loaded. ``update`` must change only that state and the parameters, in place, and depend on nothing else.
    """
    with _naming(f"outer optimizer {type(outer).__name__}"):
        start, means = _draw(0), [_draw(seed) * 0.1 for seed in range(1, 5)]
        values = start.clone()
        state = outer.init(values)
        expect(isinstance(state, OuterState), f"init returned a {type(state).__name__}, not a diloco.OuterState")
        expect(torch.equal(values, start), "init changed the parameters")
        expect(state.step == 0, f"init returned a state at step {state.step}, not 0")
        names = _slots(state)
        for count, mean in enumerate(means, 1):
            given = mean.clone()
            outer.update(given, state, values)
            expect(torch.equal(mean, given), "update changed the mean")
            given.fill_(math.nan)  # its memory is not the optimizer's
            expect(state.step == count, f"the state is at step {state.step} after {count} updates")
            expect(_slots(state) == names, "update added or removed slots of the state")
            finite = all(bool(tensor.isfinite().all()) for tensor in (values, *state.slots.values()))
            expect(finite, f"after {count} updates a parameter or slot is not finite, or in the memory of the mean")
            if count == 2:  # as a joiner or a checkpoint copies it
                resumed = OuterState(state.step, {slot: held.clone() for slot, held in state.slots.items()})
                other = values.clone()
        expect(not torch.equal(values, start), f"the parameters have not moved in {len(means)} updates")
        for mean in means[2:]:
            outer.update(mean, resumed, other)
        alike = torch.equal(other, values) and all(
            torch.equal(resumed.slots[slot], state.slots[slot]) for slot in names
        )
        expect(alike, "it continues differently from a copy of its state, so part of its state is elsewhere")


def check_average_rule(rule: AverageRule | None) -> None:
    """Raise `ContractError` unless ``rule`` keeps the contract of `AverageRule`.

    It must return equal bits each time, for any number and weights of contributions, of which each overwrites the one
    before.
    """
    sizes = [_SIZE - 7, 0, 7]

    def average(count: int, scale: float = 1.0, stop: int = _SIZE) -> Tensor:
        buffer = torch.empty_like(_draw(0)[:stop])
        given = ((1.0 + 0.5 * number, buffer.copy_(_draw(number)[:stop]).mul_(scale)) for number in range(count))
        found: Tensor = rule.combine(given, sizes if stop == _SIZE else [stop])  # type: ignore[union-attr]  # None is caught below
        buffer.fill_(math.nan)  # which the average shares no memory with
        return found

    with _naming(f"average {type(rule).__name__}"):
        elementwise = getattr(rule, "elementwise", None)
        expect(isinstance(elementwise, bool), f"elementwise is {elementwise!r}; it must be True or False")
        for count, scale in ((1, 1.0), (4, 1.0), (4, 0.0), (4, 1e-12)):
            found = average(count, scale)
            _expect_vector("combine returned", found, "values")
            finite = f"the average of {count} contributions is not finite, or shares their memory"
            expect(bool(found.isfinite().all()), finite)
            expect(torch.equal(found, average(count, scale)), "equal contributions give different averages")
        for stop in range(1, 99, 7) if elementwise else ():
            alike = torch.allclose(average(4, stop=stop), average(4)[:stop], rtol=1e-4, atol=1e-6)
            expect(alike, "elementwise is True, but a value of the average depends on others")


def check_merge_rule(rule: MergeRule) -> None:
    """Raise `ContractError` unless ``rule`` keeps the contract of `MergeRule`.

    It must change only the local parameters, and nothing if the local, global and sent parameters are equal.
    """
    with _naming(f"merge rule {type(rule).__name__}"):
        keeps = getattr(rule, "keeps_sent", None)
        expect(isinstance(keeps, bool), f"keeps_sent is {keeps!r}; it must be True or False")
        merged = []
        for _ in range(2):
            local, global_params, sent = _draw(0), _draw(1), _draw(2) if keeps else None
            returned: object = rule.merge(local, global_params, sent)  # type: ignore[func-returns-value]  # a wrong one's
            expect(returned is None or returned is local, "merge returned its result; it must update `local` in place")
            expect(torch.equal(global_params, _draw(1)), "merge changed the global parameters")
            expect(sent is None or torch.equal(sent, _draw(2)), "merge changed the sent parameters")
            expect(bool(local.isfinite().all()), "the local parameters are not finite after a merge")
            merged.append(local)
        expect(torch.equal(*merged), "equal merges give different parameters")
        local, global_params, sent = _draw(0), _draw(1), _draw(2)
        for part in (slice(_SIZE // 3), slice(_SIZE // 3, _SIZE)):
            rule.merge(local[part], global_params[part], sent[part] if keeps else None)
        expect(torch.equal(local, merged[0]), "it merges parts of a fragment differently from the whole")
        local = _draw(0)
        rule.merge(local, _draw(0), _draw(0) if keeps else None)
        still = bool((local - _draw(0)).abs().max() <= 1e-6)
        expect(still, "parameters move although the local, global and sent ones are equal")


def check_inner_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Raise `ContractError` unless the optimizer that ``make`` returns trains a model and resumes from a checkpoint.

    It must hold every trainable parameter exactly once, reduce the loss, and give equal bits after ``load_state_dict``
    of its ``state_dict`` as without.
    """
    model = _model()
    optimizer = make(model)
    with _naming(f"inner optimizer {type(optimizer).__name__}"):
        expect(isinstance(optimizer, torch.optim.Optimizer), "it is not a torch.optim.Optimizer")
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        wanted = [id(parameter) for parameter in model.parameters()]
        expect(len(held) == len(set(held)), "it holds a parameter twice")
        expect(set(held) == set(wanted), f"it holds {len(set(held) & set(wanted))} of {len(wanted)} parameters")
        expect(all("lr" in group for group in optimizer.param_groups), "it has parameter groups without lr")
        first = _trained(model, optimizer, 6)
        other = copy.deepcopy(model)
        resumed = make(other)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        last = _trained(model, optimizer, 6)
        expect(last < first, f"the loss is {first:.4g} after 6 steps and {last:.4g} after 12")
        _trained(other, resumed, 6)
        alike = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        expect(alike, "it continues differently from its state_dict, so part of its state is elsewhere")


def _slots(state: OuterState) -> set[str]:
    for slot, values in state.slots.items():
        _expect_vector(f"slot {slot!r} is", values, "parameters")
    return set(state.slots)


def _expect_vector(what: str, value: object, wanted: str) -> None:
    shape = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
    expect(shape == ((_SIZE,), torch.float32), f"{what} {shape}, not a float32 vector as long as the {wanted}")


def _draw(seed: int) -> Tensor:
    return _normal(_SIZE, torch.Generator("cpu").manual_seed(seed))


def _model() -> nn.Module:
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
        return model.append(nn.Linear(8, 12, bias=False)).float()


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train ``steps`` full-batch steps to predict each token's successor. Return the loss before the last step."""
    tokens, last = torch.arange(12, dtype=torch.int64, device="cpu"), math.nan
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        optimizer.zero_grad()
        last = float(loss.detach())
    return last
