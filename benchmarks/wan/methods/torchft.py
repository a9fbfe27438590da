"""torchft's DiLoCo: a lighthouse and a manager per replica, gloo between them, one all-reduce per tensor."""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.wan.methods import base
from benchmarks.wan.plan import Job
from benchmarks.wan.work import digest

LIGHTHOUSE_PORT = 29510
STORE_PORT = 29511
MANAGER_PORT = 29512


class Program(base.Program):
    """With ``streaming``, fragments of every P-th layer as in this package.

    A fragment is sent tau steps before it is due, and merged when it is due.
    """

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        streaming = bool(self.options.get("streaming"))
        count = self.work.num_fragments if streaming else 1
        layers = list(self.model.layers)
        self.parts: list[nn.Module] = [nn.ModuleList(layers[part::count]) for part in range(count)]
        self.overlap_steps = self.work.overlap_steps if streaming else 0
        self._blocked_s = 0.0

    def prepare(self) -> Mapping[str, Any]:
        if self.replica == 0:
            coordination: Any = importlib.import_module("torchft.coordination")
            self.lighthouse = coordination.LighthouseServer(
                bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=self.job.num_replicas
            )
        self.store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not export it
            self.address, STORE_PORT, is_master=True, wait_for_workers=False
        )
        return {}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        local_sgd: Any = importlib.import_module("torchft.local_sgd")
        manager: Any = importlib.import_module("torchft.manager")
        process_group: Any = importlib.import_module("torchft.process_group")
        timeout = timedelta(seconds=self.job.timeout_s)
        self.manager = manager.Manager(
            pg=process_group.ProcessGroupGloo(timeout=timeout),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=self.job.num_replicas,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=self.address,
            store_port=STORE_PORT,
            lighthouse_addr=f"http://{self.job.addresses[0]}:{LIGHTHOUSE_PORT}",
            replica_id=f"replica_{self.replica}",
            port=MANAGER_PORT,
            hostname=self.address,
            init_sync=False,  # all replicas start from the same weights
        )
        learning_rate = 0.7 if len(self.parts) == 1 else 0.4
        self.diloco = local_sgd.DiLoCo(
            self.manager,
            self.parts,
            self.loop.optimizer,
            [torch.optim.SGD(p.parameters(), lr=learning_rate, momentum=0.9, nesterov=True) for p in self.parts],
            sync_every=self.work.inner_steps,
            fragment_sync_delay=self.overlap_steps,
        )
        self.manager.start_quorum = self._timed(self.manager.start_quorum)
        for fragment in self.diloco._fragments:
            fragment.prepare_sync = self._timed(fragment.prepare_sync)
            fragment.perform_sync = self._finishing(fragment.perform_sync)
        self.diloco.__enter__()

    def step(self, step: int) -> None:
        self.loop.compute()
        self.loop.update(step)  # torchft acts in a hook of the optimizer

    def digest(self) -> str:
        fragments = self.diloco._fragments
        return digest(tensor for fragment in fragments for tensor in fragment.original_parameters.values())

    def close(self) -> None:
        self.diloco.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        if self.replica == 0:
            self.lighthouse.shutdown()

    def _timed(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``function`` wrapped so that its time counts as time for which the training loop is blocked."""

        def timed() -> Any:
            started_s = time.perf_counter()
            result = function()
            self._blocked_s += time.perf_counter() - started_s
            return result

        return timed

    def _finishing(self, function: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``perform_sync`` wrapped so that its end, committed or not, counts as a synchronisation."""

        def counted() -> bool:
            committed: bool = self._timed(function)()
            self.waits_s.append(self._blocked_s)
            if not self.overlap_steps:
                self.transfers_s.append(self._blocked_s)
            self._blocked_s = 0.0
            self.failures += not committed
            self.payload_bytes += base.ring_bytes(self.work.values // len(self.parts), self.job.num_replicas)
            return committed

        return counted
