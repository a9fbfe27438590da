"""Checks of code that can fail only on a GPU. A check passes, fails with the difference found, or is skipped."""

import importlib.util
import math
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.sessions import settle
from benchmarks.gpu.sizes import Sizes
from diloco import DiLoCo, SyncSchedule, connect_process_group, connect_tcp
from diloco.algorithm import (
    CODECS,
    Contribution,
    FragmentLayout,
    Nesterov,
    RoundId,
    SendersMean,
    Sgd,
    ValueSchedule,
    digest_tensors,
    encode_mean,
    flatten,
    isotropic,
    make_codec,
    plan_round,
    weighted_mean,
)
from diloco.devices import beside_training as on_side_stream
from diloco.devices import to_device
from diloco.errors import NonFiniteError
from diloco.model import (
    DecoderSettings,
    LanguageModel,
    ModelSettings,
    Transformer,
    attend,
    block_mask,
    boolean_mask,
    build_language_model,
    build_model,
    document_numbers,
)
from diloco.train import (
    InnerLoop,
    OptimizerSettings,
    ParallelModel,
    Strategy,
    make_inner_optimizer,
    parallelise,
    prepare_blocks,
)
from diloco.transport import Pending, open_replica_group
from diloco.units import format_bytes
from diloco.waiting import in_thread

CPU = torch.device("cpu")
MODEL = DecoderSettings(layers=2, width=128, ffn_width=256, heads=4, kv_heads=2, qk_norm=True, vocab_size=512)


OPTIMIZERS = ("AdamW", "Muon")


class SkippedError(Exception):
    """The check is not possible on this device or with this torch."""


def run_checks(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each check: ``ok`` is True, False, or None if it was skipped; ``detail`` gives the finding."""
    rows = []
    for name, check in CHECKS.items():
        try:
            row = {"name": name, "ok": True, "detail": check(sizes, device)}
        except SkippedError as reason:
            row = {"name": name, "ok": None, "detail": str(reason)}
        except Exception as error:  # any error is a finding
            row = {"name": name, "ok": False, "detail": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        rows.append(row)
        print(f"  {row}", flush=True)
    return rows


def _batch(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of four sequences of the model's maximal length."""
    shape, generator = (4, model.max_sequence_length + 1), torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _model(sizes: Sizes, device: torch.device, **changes: Any) -> Transformer:
    return build_model(replace(MODEL, max_sequence_length=sizes.check_tokens, **changes), seed=0, device=device)


def _gradients(model: Transformer, precision: torch.dtype | None, *, documents: bool = False) -> list[Tensor]:
    tokens, targets = (each.to(model.model.embed_tokens.weight.device) for each in _batch(model))
    model.zero_grad()
    with torch.autocast(tokens.device.type, precision, enabled=precision is not None):
        loss = model.loss(tokens, targets, document_numbers(tokens, 7) if documents else None).loss
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest norm of a difference, relative to the norm of the expected tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).norm() / other.norm().clamp_min(1e-12)) for one, other in pairs)


def _below(error: float, limit: float) -> str:
    if not error < limit:
        raise AssertionError(f"the relative difference is {error:.2e}; the limit is {limit:.0e}")
    return f"relative difference {error:.1e}"


def _loop(
    model: Transformer, precision: Any, strategy: Strategy = "none", group: Any = None, name: str = "AdamW"
) -> InnerLoop:
    """Return the inner loop of a model; one that was built on meta is filled after it was sharded."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    parallel = parallelise(model, strategy, group, device, precision) if group is not None else ParallelModel(model)
    if model.model.rotary_cosine.is_meta:
        model.to_empty(device=device)
        model.initialise(0)
    optimizer = make_inner_optimizer(OptimizerSettings(name=name), model, group)
    return InnerLoop(parallel, optimizer, learning_rate=ValueSchedule(peak=1e-3), precision=precision)


def _train(loop: InnerLoop, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(float(loop.accumulate_gradients(*_batch(loop.model))))
        loop.unscale()
        loop.apply(step)
    return losses


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise SkippedError("no CUDA device")


def copies(sizes: Sizes, device: torch.device) -> str:
    values = torch.arange(1 << 20)
    for number in range(20):  # a copy may reuse the pinned memory of an earlier one
        copied = to_device(values + number, device)
        assert torch.equal(copied.cpu(), values + number), "a copy differs from its source"
    return "20 copies of 8 MB"


def flash(sizes: Sizes, device: torch.device) -> str:
    _require_cuda(device)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises if the kernel can't take queries, keys and values
        _gradients(_model(sizes, device), torch.bfloat16)
    return "the flash kernel takes queries, keys and values under bfloat16 autocast"


def chunks(sizes: Sizes, device: torch.device) -> str:
    at_once, chunked = _model(sizes, device, z_loss=1e-4), _model(sizes, device, z_loss=1e-4)
    chunked.loss_chunk_tokens, chunked.compiled_loss = 100, sizes.backend is not None
    exact = _below(_largest_error(_gradients(chunked, None), _gradients(at_once, None)), 1e-4)
    half = _below(_largest_error(_gradients(chunked, torch.bfloat16), _gradients(at_once, torch.bfloat16)), 2e-2)
    return f"float32: {exact}; bfloat16: {half}"


def documents(sizes: Sizes, device: torch.device) -> str:
    _require_cuda(device)  # torch has no backward pass of FlexAttention on other devices
    length = sizes.check_tokens
    numbers = document_numbers(torch.randint(40, (4, length), generator=torch.Generator().manual_seed(0)), 7).to(device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((4, 4, length, 32), (4, 2, length, 32), (4, 2, length, 32))
    heads = [torch.randn(shape, device=device, generator=generator).requires_grad_() for shape in shapes]
    results = []
    for mask in (boolean_mask(numbers), block_mask(numbers)):
        attended = attend(heads[0], heads[1], heads[2], mask, grouped=True)
        results.append([attended.detach(), *torch.autograd.grad(attended.square().sum(), heads)])
    return _below(_largest_error(results[1], results[0]), 1e-3)


def packed(sizes: Sizes, device: torch.device) -> str:
    """Compare the kernels that need no dense mask with the one that does, in a Llama of transformers."""
    _require_cuda(device)
    from transformers import LlamaConfig

    length = sizes.check_tokens
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    kernels = ["sdpa", "flex_attention", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]
    tokens = torch.randint(40, (4, length), generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for kernel in kernels:
            settings = ModelSettings(source=f"hf:{folder}", arguments={"attn_implementation": kernel})
            model = build_language_model(settings, seed=0, device=device)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model.loss(tokens, tokens.roll(-1, 1), document_numbers(tokens, 7)).loss
            torch.autograd.backward(loss)
            results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return f"{', '.join(kernels)}: {_below(max(_largest_error(each, results[0]) for each in results[1:]), 3e-2)}"


def compiled(sizes: Sizes, device: torch.device) -> str:
    if sizes.backend is None:
        raise SkippedError("the tiny run compiles nothing")
    found_errors = []
    for checkpointing in ("none", "full", "selective"):
        for apart in (False, True) if device.type == "cuda" else (False,):
            plain, model = _model(sizes, device), _model(sizes, device)
            prepare_blocks(model, checkpointing=checkpointing, compiled=True, backend=sizes.backend)
            found = _gradients(model, torch.bfloat16, documents=apart)
            expected = _gradients(plain, torch.bfloat16, documents=apart)
            found_errors.append(f"{checkpointing}: {_below(_largest_error(found, expected), 3e-2)}")
    torch._dynamo.reset()
    return "; ".join(found_errors)


def masked_step(sizes: Sizes, device: torch.device) -> str:
    loop = _loop(_model(sizes, device), "bfloat16")
    assert loop.masked == (device.type == "cuda"), "the fused kernel was not used"
    _train(loop, 2)
    held = [p.detach().clone() for p in loop.model.parameters()]
    loop.accumulate_gradients(*_batch(loop.model))
    gradient = loop.model.get_parameter("model.layers.0.self_attn.q_proj.weight").grad
    assert gradient is not None
    gradient[0, 0] = math.nan
    try:
        loop.apply(2)
    except NonFiniteError:
        unchanged = all(torch.equal(p, before) for p, before in zip(loop.model.parameters(), held, strict=True))
        assert unchanged, "a parameter was changed"
        return "the step was refused and no parameter changed"
    raise AssertionError("a NaN gradient was applied")


def scaler(sizes: Sizes, device: torch.device) -> str:
    loop = _loop(_model(sizes, device), "float16")
    losses = _train(loop, 8)
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    before = loop.scaler.get_scale()
    loop.accumulate_gradients(*_batch(loop.model))
    next(p.grad for p in loop.model.parameters() if p.grad is not None).fill_(math.inf)
    loop.unscale()
    assert loop.apply(8).skipped, "an infinite gradient was applied"
    assert loop.scaler.get_scale() == before / 2, "the scale was not halved"
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f} in 8 steps; the scale was halved once"


def codecs(sizes: Sizes, device: torch.device) -> str:
    generator = torch.Generator().manual_seed(0)
    count = sizes.check_values + 3  # not a whole number of blocks
    values = torch.randn(count, generator=generator) * torch.rand(count, generator=generator).pow(8)
    values[:3] = torch.tensor([0.0, -0.0, 1e-30])
    for name in CODECS.names:
        codec = make_codec(name)
        here, there = codec.encode(values), codec.encode(values.to(device)).cpu()
        assert torch.equal(here, there), f"{name} encodes {int((here != there).sum())} bytes differently"
        decoded = codec.decode(here, len(values)), codec.decode(here.to(device), len(values)).cpu()
        assert torch.equal(decoded[0].view(torch.int32), decoded[1].view(torch.int32)), f"{name} decodes differently"
    return f"{', '.join(CODECS.names)}: the same bits as on the CPU"


def means(sizes: Sizes, device: torch.device) -> str:
    """Compare means of contributions: a division that is rounded otherwise shows for M = 3, 5, 6 and 7."""
    count, codec = sizes.check_values + 3, make_codec("int8")
    payloads = [codec.encode(_drawn(count, seed)) for seed in range(7)]
    for number in range(1, 8):
        for rule in (None, SendersMean()):
            for max_norm in (None, 1.0):
                found = []
                for place in (torch.device("cpu"), device):
                    given = [
                        Contribution(
                            round=RoundId(0, 0),
                            replica=replica,
                            codec=codec,
                            numel=count,
                            payload=payload.to(place),
                            average_rule=rule,
                            max_norm=max_norm,
                            tensors=(count - 2, 2),
                        )
                        for replica, payload in enumerate(payloads[:number])
                    ]
                    mean = weighted_mean(given).values
                    encode_mean(encoded := mean.clone(), codec)
                    found.append(digest_tensors({"mean": mean, "encoded": encoded}))
                assert found[0] == found[1], f"means of {number} replicas differ (rule {rule}, max_norm {max_norm})"
    return "of 1 to 7 replicas, by every rule, clipped or not: the CPU's bits"


def outer_steps(sizes: Sizes, device: torch.device) -> str:
    for outer in (Sgd(), Nesterov()):
        found = []
        for place in (torch.device("cpu"), device):
            values = _drawn(sizes.check_values, 0).to(place)
            state = outer.init(values)
            for seed in range(1, 9):
                outer.update(_drawn(sizes.check_values, seed).to(place), state, values)
            found.append(digest_tensors({"values": values, **state.slots}))
        assert found[0] == found[1], f"{outer} gives other bits"
    return "eight of SGD and Nesterov: the CPU's bits"


def isotropic_means(sizes: Sizes, device: torch.device) -> str:
    def made(rows: int, columns: int, place: torch.device) -> tuple[str, float]:
        layout = FragmentLayout(0, ("matrix",), ((rows, columns),))
        mean = _drawn(rows * columns, 0).to(place)
        matrices = {"matrix": torch.nn.Parameter(mean.view(rows, columns))}
        settle(place)
        started_s = time.perf_counter()
        digest = digest_tensors({"": isotropic(mean, layout, matrices)})
        return digest, time.perf_counter() - started_s

    for shape in ((256, 256), (96, 1000), (1000, 96)):
        assert made(*shape, CPU)[0] == made(*shape, device)[0], f"a mean of {shape} has other bits"
    least_s = min(made(2048, 2048, device)[1] for _ in range(3))
    return f"the CPU's bits; a matrix of 2048 x 2048 takes {1e3 * least_s:.0f} ms"


def _drawn(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.rand(count, generator=generator).pow(8)


def other_gpu(sizes: Sizes, device: torch.device) -> str:
    """Copy from a GPU that is not torch's current one, while it is busy, to pinned memory."""
    _require_cuda(device)
    if torch.cuda.device_count() < 2:
        raise SkippedError("this check needs two GPUs")
    there = torch.device("cuda", (torch.cuda.current_device() + 1) % 2)
    busy = torch.randn(4096, 4096, device=there)
    for number in range(5):
        values = torch.zeros(1 << 24, device=there)
        for _ in range(20):
            busy = (busy @ busy).clamp_(-1, 1)
        values += number
        host = flatten([values], torch.empty(len(values), pin_memory=True))
        assert bool((host == number).all()), "the host read a copy in progress"
    return "five copies from the other GPU"


def digests(sizes: Sizes, device: torch.device) -> str:
    """Compare digests with the CPU's: of blocks and parts, bytes that fill no lane, odd addresses, on a side stream."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20 * sizes.check_values, generator=generator)
    data = torch.randint(256, (1 << 16,), dtype=torch.uint8, generator=generator)
    tensors = {"x": values, "y": values[:-5], "bfloat16": values[:4099].bfloat16()[1:]}
    tensors |= {f"{size}": data[1 : size + 1] for size in (0, 1, 3, 4, 8191, 8192, 8193, 40_007)}
    expected = digest_tensors(tensors)
    assert digest_tensors(tensors, "torch") == expected, "those of torch operations and C kernel differ"
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    settle(device)
    with on_side_stream(device):
        beside = digest_tensors(moved)
    assert {digest_tensors(moved), beside} == {expected}, "the digests differ"
    taken_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        digest_tensors({"x": moved["x"]})
        taken_s.append(time.perf_counter() - started_s)
    size = format_bytes(values.nbytes)
    return f"the digest of {size} equals the CPU's and takes {1e3 * min(taken_s):.1f} ms"


def held_globals(sizes: Sizes, device: torch.device) -> str:
    """Put the global parameters into a model, which must not need room for a second copy of the local ones."""
    _require_cuda(device)
    model = torch.nn.Linear(4096, 4096, bias=False, device=device)
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters()))
    settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with diloco.global_model():
        more = torch.cuda.max_memory_allocated(device) - before
    assert more < model.weight.nbytes // 2, f"{format_bytes(more)} more are held during an evaluation"
    return "the local parameters wait in host memory"


def background_digest(sizes: Sizes, device: torch.device) -> str:
    """Change a global state on a busy stream again and again; its digest must be that of the finished change."""
    model = torch.nn.Linear(2048, 2048, bias=False, device=device)
    state = DiLoCo(model, torch.optim.SGD(model.parameters())).fragments[0].state
    busy = torch.randn(2048, 2048, device=device)
    for number in range(5):
        with state.changing():
            for _ in range(20):
                busy = (busy @ busy).clamp_(-1, 1)
            state.values.add_(busy.view(-1)).add_(number)
        digest = state.digest()
        settle(device)
        assert digest == state.digest_of(state.tensors()), "the thread read a state in change"
    return "five digests computed beside the training"


def muon_compiled(sizes: Sizes, device: torch.device) -> str:
    """Compare a step of Muon with the iteration compiled; on CUDA both are in bfloat16."""
    if sizes.backend is None:
        raise SkippedError("the tiny run compiles nothing")
    moved = []
    for compiled in (False, True):
        model = _model(sizes, device)
        optimizer = make_inner_optimizer(OptimizerSettings(name="Muon"), model, compiled=compiled)
        _gradients(model, torch.bfloat16)
        optimizer.step()
        moved.append(
            [p.detach() - q for p, q in zip(model.parameters(), _model(sizes, device).parameters(), strict=True)]
        )
    torch._dynamo.reset()
    return _below(_largest_error(*moved), 6e-2)  # two orders of rounding in bfloat16: 2e-2 on a CPU


def beside_training(sizes: Sizes, device: torch.device) -> str:
    """Compare rounds of two replicas over TCP, with global parameters on the GPU and on the host, with the CPU's."""
    places = {"the CPU": (CPU, None), "the GPU": (device, None), "the host": (device, "cpu")}
    for codec, mean in (("fp4", "float32"), ("float32", "fp4")):  # an all-gather, and a reduce-scatter
        digests = {}
        for name, (place, home) in places.items():
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            train = partial(_train_over_tcp, address, place, home, codec, mean)
            first, second = [in_thread(partial(train, replica), "replica") for replica in range(2)]
            digests[name], summed_on = zip(first.result(60.0), second.result(60.0), strict=True)
            assert {*summed_on} == {str(place if home is None else home)}, f"{name}: summed on {summed_on}"
        assert len(set(digests.values())) == 1, f"the digests of {codec} with means in {mean} differ: {digests}"
    return f"three rounds with global parameters on {', '.join(places)}, summed there: the same digests"


def _train_over_tcp(
    address: str, place: torch.device, home: str | None, codec_name: str, mean: str, replica: int
) -> tuple[tuple[str, str], str]:
    """Return the digests of the global and the local parameters of a replica, and the devices on which it sums."""
    model = torch.nn.ParameterList([torch.nn.Parameter(_drawn(1 << 20, seed).to(place)) for seed in range(2)])
    codec, devices = make_codec(codec_name), set[str]()
    accumulate = codec.accumulate

    def watched(payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        devices.add(str(out.device))
        accumulate(payload, out, weight)

    codec.accumulate = watched  # type: ignore[method-assign]  # to see where it sums
    with connect_tcp(replica=replica, num_replicas=2, rendezvous=address) as transport:
        diloco = DiLoCo(
            model,
            torch.optim.SGD(model.parameters()),
            transport=transport,
            schedule=SyncSchedule(inner_steps=4, num_fragments=1, overlap_steps=2),
            codec=codec,
            mean_codec=mean,
            global_device=home,
        )
        for _ in range(14):
            with torch.no_grad():
                for parameter in model.parameters():  # elementwise, so that all places have the same bits
                    parameter.mul_(0.75).sub_(0.125 * (1 + replica))
            diloco.step()
        diloco.drain()
    local = digest_tensors({str(number): values for number, values in enumerate(model.parameters())})
    return (diloco.digest(), local), ", ".join(sorted(devices))


def sharded(sizes: Sizes, device: torch.device) -> str:
    if dist.is_initialized():
        raise SkippedError("torch.distributed is already initialised")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[attr-defined]  # missing in torch's stubs
        group = open_replica_group(store, replica=0, position=0, size=1, device=device, timeout_s=60.0)
        try:
            strategies: tuple[Strategy, ...] = ("ddp", "fsdp")
            for strategy, name in product(strategies, OPTIMIZERS):
                expected = _train(_loop(_model(sizes, device), "bfloat16", name=name), 3)
                for chunk_tokens in (0, 100):
                    model = _model(sizes, torch.device("meta") if strategy == "fsdp" else device)
                    model.loss_chunk_tokens = chunk_tokens
                    prepare_blocks(model, checkpointing="selective")
                    found = _train(_loop(model, "bfloat16", strategy, group, name), 3)
                    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
                    assert difference < 1e-2, f"{strategy}, {name}: losses {found} instead of {expected}"
        finally:
            group.close()
    return (
        "ddp and fsdp (built on meta, gathered in bfloat16) on one rank have a single process's losses, also with Muon"
    )


def ranks(sizes: Sizes, device: torch.device) -> str:
    _require_cuda(device)
    if torch.cuda.device_count() < 2:
        raise SkippedError("this check needs two GPUs")
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (sizes, 2, str(Path(folder) / "store"), results), nprocs=2)  # type: ignore[no-untyped-call]  # torch's
    losses = [results.get() for _ in range(2)]
    expected = [_train(_loop(_model(sizes, device), "bfloat16", name=name), 3) for name in OPTIMIZERS]
    for found in losses:
        pairs = zip(chain(*found), chain(*expected), strict=True)
        assert max(abs(a - b) for a, b in pairs) < 2e-2, f"{found} instead of {expected}"
    return (
        "fsdp on two GPUs over NCCL has the losses of one GPU, with AdamW and with Muon, whose matrices are exchanged"
    )


def _rank(position: int, sizes: Sizes, size: int, store_path: str, results: Any) -> None:
    device = torch.device("cuda", position)
    torch.cuda.set_device(device)
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]  # missing in torch's stubs
    group = open_replica_group(store, replica=0, position=position, size=size, device=device, timeout_s=100.0)
    models = [_model(sizes, torch.device("meta")) for _ in OPTIMIZERS]
    loops = [_loop(model, "bfloat16", "fsdp", group, name) for model, name in zip(models, OPTIMIZERS, strict=True)]
    results.put([_train(loop, 3) for loop in loops])
    group.close()


def process_groups(sizes: Sizes, device: torch.device) -> str:
    """Average over NCCL, one replica per GPU, beside other collectives; with one GPU, of a single replica."""
    _require_cuda(device)
    if dist.is_initialized():
        raise SkippedError("torch.distributed is already initialised")
    count, results = min(4, torch.cuda.device_count()), torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_replica, (sizes, count, str(Path(folder) / "store"), results), nprocs=count)  # type: ignore[no-untyped-call]  # torch's
    digests = {results.get() for _ in range(count)}
    assert digests == {_averages(sizes, count)}, "the averages differ from the CPU's"
    return f"{len(CODECS.names)} codecs, plain and encoded means of {count} replicas on NCCL: the CPU's bits"


def _contributions(sizes: Sizes, replica: int, device: torch.device) -> Iterator[Contribution]:
    """Yield a contribution in every codec, with plain means and with those that are encoded."""
    for number, (name, mean) in enumerate(product(CODECS.names, ("float32", "fp4"))):
        codec = make_codec(name)
        values = _drawn(sizes.check_values + 3, 100 * number + replica)
        yield Contribution(
            round=RoundId(0, number),
            replica=replica,
            codec=codec,
            numel=len(values),
            payload=codec.encode(values).to(device),
            mean=mean,
        )


def _replica(rank: int, sizes: Sizes, size: int, store_path: str, results: Any) -> None:
    """Submit each round before the last one is merged, while gradients are reduced on another group."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
    busy, averages = torch.randn(1 << 22, device=device), list[Tensor]()
    with connect_process_group() as transport:
        flights: list[Pending] = []
        for contribution in _contributions(sizes, rank, device):
            flights.append(transport.average(contribution))
            for _ in range(5):
                dist.all_reduce(busy.mul_(0.5), async_op=True)
            if len(flights) == 2:
                averages.append(flights.pop(0).wait().values)
        averages.append(flights.pop(0).wait().values)
    results.put(digest_tensors({str(number): values for number, values in enumerate(averages)}))
    dist.destroy_process_group()


def _averages(sizes: Sizes, count: int) -> str:
    """Return the digest of the averages that the pure functions give on the CPU."""
    averages = {}
    for number, given in enumerate(zip(*(_contributions(sizes, m, CPU) for m in range(count)), strict=True)):
        values, plan = weighted_mean(given).values, plan_round(given[0], count)
        if plan.pattern == "reduce-scatter":
            encode_mean(values, plan.mean)
        averages[str(number)] = values
    return digest_tensors(averages)


CHECKS: dict[str, Callable[[Sizes, torch.device], str]] = {
    "pinned copies arrive": copies,
    "flash attention is taken": flash,
    "the loss in chunks": chunks,
    "documents by FlexAttention": documents,
    "documents in models of transformers": packed,
    "compiled blocks": compiled,
    "bad gradients are never applied": masked_step,
    "the float16 scaler": scaler,
    "codecs give the CPU's bits": codecs,
    "means give the CPU's bits": means,
    "outer steps give the CPU's bits": outer_steps,
    "isotropic means have the CPU's bits": isotropic_means,
    "copies from another GPU arrive": other_gpu,
    "digests": digests,
    "digests in a thread": background_digest,
    "global parameters to evaluate": held_globals,
    "rounds beside the training give the CPU's bits": beside_training,
    "Muon's iteration, compiled": muon_compiled,
    "ddp and fsdp on one rank": sharded,
    "NCCL inside a replica": ranks,
    "NCCL between replicas": process_groups,
}
