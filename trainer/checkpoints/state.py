"""Weights, optimizer and common values as a Megatron distributed checkpoint: one rank's part of it.

A save copies what this rank holds and returns. A thread writes the copies, and a last collective call, once every rank
has written, adds the metadata that make them a checkpoint. Steps may be taken between the two.

There are two formats of the optimizer state:

  by place      each data-parallel rank writes the slice that it updates: nothing is gathered. Loads if as many ranks
                share layers and experts; the number of ranks that differ in their rows alone may change
  reshardable   each data-parallel rank gathers the optimizer state of its whole shard. Loads on any layout

CPU memory per rank in bytes, beside what it trains with, for P parameters of its shard of w bytes each on D
data-parallel ranks: a save by place holds 12 P / D until it is written. A reshardable save gathers 12 P on each of the
D ranks, by way of 12 P / D and another 12 P, and gloo's 8 P; the first rank copies what it gathered, and holds that
until it is written; the first also holds w P of weights. A load by place writes in place, and holds what it reads at
once: a third of the optimizer's slice, or a weight. A reshardable load holds 12 P and w P.

Each rank hashes what it has written in the same thread, and uploads it if checkpoints lie in an object store. Before a
load, ranks on a shared disk verify the shards among them; with a store each rank fetches and verifies the files that
hold what it loads.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from turnlog.infra.blobs import BlobError
from turnlog.infra.run_folder import full_disk
from turnlog.schemas.types import BlobRef
from turnlog.trainer import CheckpointDamaged, CheckpointFailed, CheckpointUnusable, mcore
from turnlog.trainer.checkpoints.places import SHARDS, StorePlace, check_shards, file_sha256
from turnlog.trainer.checkpoints.sequential import read_single_experts, stacked_parameters

log = logging.getLogger(__name__)
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Megatron's format that loads under another tensor, pipeline and data parallel size."""
BY_PLACE = {"distrib_optim_sharding_type": "dp_reshardable"}
"""Megatron's format that gathers nothing."""


LOOK_S = 1.0
"""Pause between two looks at whether all ranks have written."""
State = tuple[Any, Any]
"""(model, optimizer) of a network."""


class Save:
    """A checkpoint that is being written to disk."""

    def __init__(
        self,
        policy: State,
        critic: State | None,
        directory: Path,
        common: Mapping[str, Any],
        *,
        reshardable: bool,
        place: StorePlace | None = None,
    ) -> None:
        """Copy the state into memory and begin to write it into an existing empty folder. Collective.

        `common` must be the same on every rank. `place` is where each rank uploads what it has written. Raises
        CheckpointFailed.
        """
        self._directory, self._place = directory, place
        self._stored: dict[str, BlobRef] = {}
        self._failure: BlobError | OSError | None = None
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Megatron would start a manager process (5 s, and an orphan after a kill) to return write results from
        # processes that it forks; a thread of this process needs neither.
        mcore.filesystem_async._results_queue = self._results
        strategy = mcore.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        sharding = RESHARDABLE if reshardable else BY_PLACE
        common = {**common, "critic": True} if critic else common
        said = {**common, "sharding": sharding["distrib_optim_sharding_type"], "shards": shards(policy)}
        said["experts"] = "stacked" if stacked_parameters(policy[0]) else "single"
        state = {**_sharded_state(policy, critic, sharding, is_loading=False), "common": said}
        with mcore.quiet(), self._failing():
            self._request = mcore.dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True)
        del state
        live = _storages(*policy) | (_storages(*critic) if critic else set())
        buckets = self._request.async_fn_args[1] if self._request.async_fn else []
        copies = [
            (path, key, (texts, [(item, _apart(tensor, live)) for item, tensor in tensors]))
            for path, key, (texts, tensors) in buckets
        ]
        self.bytes = sum(tensor.nbytes for _, _, (_, tensors) in copies for _, tensor in tensors)
        """Bytes of the copies that are held until they are written."""
        self._thread = threading.Thread(target=self._write, args=(copies,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, *, wait: bool) -> dict[str, BlobRef] | None:
        """Return the files of all ranks, with their hashes, once every rank has written its part, else None.
        Collective.

        The checkpoint is complete when the files are returned; `wait` waits for that. Raises CheckpointFailed on rank 0
        and on a rank that failed, BlobError on all.
        """
        while not self._is_written(LOOK_S if wait else 0.0):
            if not wait:
                return None
        stored = of_ranks(self._stored, self._failure)
        with mcore.quiet(), self._failing():
            for finalize in self._request.finalize_fns:
                finalize()
        return {name: ref for of_rank in stored for name, ref in of_rank.items()}

    def _is_written(self, wait_s: float) -> bool:
        """Return whether every rank has written its part, after waiting for this one's at most `wait_s`. Collective:
        ranks whose disks differ must not wait for each other in it, because that has a time-out.
        """
        self._thread.join(wait_s)
        written = torch.tensor([int(not self._thread.is_alive())], device=mcore.DEVICE)
        dist.all_reduce(written, op=dist.ReduceOp.MIN)
        return bool(written.item())

    def _write(self, buckets: list[Any]) -> None:
        """Write the copies, and hash or upload the files; runs in the thread. `finish` raises its failure."""
        found: dict[int, Any] = {}
        for place, bucket in enumerate(buckets):
            results: queue.SimpleQueue[Any] = queue.SimpleQueue()
            pending: queue.Queue[int] = queue.Queue()
            pending.put(place)
            transforms = self._request.async_fn.args[0]
            mcore.filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, place, bucket, results, pending, True
            )
            _, found[place] = results.get()
        failures = [result for result in found.values() if isinstance(result, Exception)]
        self._results.put(failures[0] if failures else found)
        if not failures:
            try:
                self._stored = {name: self._store(name) for name in {Path(path).name for path, _, _ in buckets}}
            except (BlobError, OSError) as error:
                self._failure = error

    def _store(self, name: str) -> BlobRef:
        """Upload a file that this rank has written, or hash it where it is to stay. It is still in the page cache."""
        if self._place is not None:
            return self._place.put(self._directory, name)
        file = self._directory / name
        return BlobRef(file_sha256(file), file.stat().st_size)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            raise CheckpointFailed(unwritten(self._directory, error)) from error
        except RuntimeError as error:  # for a full disk torch only reports "iostream error"
            if not full_disk(error, self._directory):
                raise
            raise CheckpointFailed(unwritten(self._directory, error)) from error


def unwritten(folder: Path, error: BaseException) -> str:
    """Return the message for a folder that could not be written; it names a full disk, whatever the library reports."""
    return f"{folder} could not be written: {full_disk(error, folder) or error}"


class _Fetching(mcore.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loading strategy that fetches the files that this rank needs before any rank loads anything."""

    def __init__(self, place: StorePlace) -> None:
        super().__init__()
        self._place = place

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        folder = Path(checkpoint_dir)
        together(lambda: self._place.fetch_files(folder.name, mcore.files_of(sharded_state_dict, folder)))
        return super().load(sharded_state_dict, checkpoint_dir)


def load_model(model: Any, directory: Path, shape: Mapping[str, Any], place: StorePlace | None = None) -> None:
    """Load the weights in place, on any layout. Collective. Raises CheckpointUnusable, BlobError."""
    _common(directory, shape)
    _verify_shards(directory, place)
    with mcore.quiet():
        sharded = {"model": model.sharded_state_dict()}
        with _loading(directory):
            state = mcore.dist_checkpointing.load(sharded, str(directory), _strategy(place))
        model.load_state_dict(state["model"])


def _verify_shards(directory: Path, place: StorePlace | None) -> None:
    """Verify the shards of a checkpoint on a shared disk. Collective. Raises CheckpointDamaged on every rank."""
    if place is None:
        together(lambda: check_shards(directory, dist.get_rank(), dist.get_world_size()))


def _strategy(place: StorePlace | None) -> _Fetching | None:
    return None if place is None else _Fetching(place)


def fetch_metadata(directory: Path, place: StorePlace | None) -> Path:
    """Return a local folder with all files of a checkpoint except its shards. Collective. Raises CheckpointDamaged,
    BlobError.
    """
    if place is None:
        return directory
    name = directory.name
    together(lambda: place.fetch_files(name, [file for file in place.manifest(name) if not file.endswith(SHARDS)]))
    return place.cache / name


def together(work: Callable[[], object]) -> None:
    """Run `work` on every rank. Collective. A failure on one rank is raised on all; CheckpointDamaged only if there is
    no other failure.
    """
    failure: Exception | None = None
    try:
        work()
    except (CheckpointDamaged, BlobError, OSError) as error:
        failure = error
    of_ranks(None, failure)


def of_ranks(said: Any, failure: Exception | None) -> list[Any]:
    """Gather the values of all ranks. Collective. If a rank has failed, its failure is raised on all."""
    found: list[tuple[Any, Exception | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(found, (said, failure))
    failures = [error for _, error in found if error is not None]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, CheckpointDamaged))
    return [one for one, _ in found]


def load_state(
    policy: State, critic: State | None, directory: Path, shape: Mapping[str, Any], place: StorePlace | None = None
) -> None:
    """Load weights and optimizer in place, and those of the critic if the checkpoint has one. Collective.

    Raises CheckpointUnusable, BlobError.
    """
    common = _common(directory, shape)
    by_place = common.get("sharding") == BY_PLACE["distrib_optim_sharding_type"]
    if by_place and common["shards"] != shards(policy):
        raise CheckpointUnusable(
            f"{directory} was written by ranks that shared the model in another way ({common['shards']}, now "
            f"{shards(policy)}): continue from it with the old layout and trainer.checkpoints_reshardable = true, and "
            "change the layout after the next checkpoint"
        )
    if critic and not common.get("critic"):
        log.warning("%s holds no critic: the critic starts from the weights that training began with", directory)
        critic = None
    _verify_shards(directory, place)
    with mcore.quiet(), torch.no_grad():  # by place, Megatron writes into parameters
        single = common.get("experts", "single") == "single"  # what is older does not say it
        sharding = BY_PLACE if by_place else RESHARDABLE
        sharded = _sharded_state(policy, critic, sharding, is_loading=True, single_experts=by_place and single)
        with _loading(directory):
            state = mcore.dist_checkpointing.load(sharded, str(directory), _strategy(place))
        for part, found in ((policy, state), (critic, state.get("critic"))):
            if part is not None:
                model, optimizer = part
                model.load_state_dict(found["model"])
                optimizer.load_state_dict(regroup_optimizers(found["optimizer"], len(optimizer.chained_optimizers)))


def _common(directory: Path, shape: Mapping[str, Any]) -> dict[str, Any]:
    common = read_common(directory)
    if common["shape"] != dict(shape):
        raise CheckpointUnusable(f"{directory} belongs to another model: {common['shape']}, not {dict(shape)}")
    return common


def shards(part: State) -> dict[str, int]:
    """Return the number of ranks among which the model is sharded, per kind of parallelism, and what else decides where
    the optimizer's values lie.
    """
    state = mcore.parallel_state
    _, optimizer = part
    # Gradients that are summed early lie in several buckets; releases before knew one.
    buckets = {"overlap_grad_reduce": 1} if optimizer.chained_optimizers[0].ddp_config.overlap_grad_reduce else {}
    return buckets | {
        "tensor_parallel": state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": state.get_pipeline_model_parallel_world_size(),
        "expert_parallel": state.get_expert_model_parallel_world_size(),
    }


def regroup_optimizers(state: dict[Any, Any], optimizers: int) -> dict[Any, Any]:
    """Convert the unsharded optimizer state to `optimizers` optimizers.

    Experts that are shared among ranks have an optimizer of their own beside that of the other parameters; all are
    configured alike and have taken the same steps.
    """
    alone = "optimizer" in state
    if alone == (optimizers == 1):
        return state
    own = ("optimizer", "param_state_sharding_type")
    if optimizers == 1:
        sharded = {name: value for name, value in state.items() if isinstance(name, str)}
        return {**sharded, **{name: state[0][name] for name in own}}
    groups = state["optimizer"]["param_groups"]
    return {
        place: {
            **state[place],
            "optimizer": {"param_groups": [{**group, "is_expert_parallel": place > 0} for group in groups]},
            "param_state_sharding_type": state["param_state_sharding_type"],
        }
        for place in range(optimizers)
    }


def read_common(directory: Path) -> dict[str, Any]:
    """Return the common values that were given to `save`. Raises CheckpointDamaged if they cannot be read."""
    file = directory / mcore.COMMON_STATE_FNAME
    try:
        whole = mcore.dist_checkpointing.check_is_distributed_checkpoint(str(directory)) and file.is_file()
        common = mcore.dist_checkpointing.load_common_state_dict(str(directory))["common"] if whole else None
    except (*UNREADABLE, mcore.CheckpointingException) as error:
        raise CheckpointDamaged(f"{file} cannot be read ({error!r}); restore it, or remove {directory}") from error
    if not isinstance(common, dict):
        raise CheckpointDamaged(f"{directory} holds no complete checkpoint; remove it to start from an older one")
    return common


UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError)
"""Exceptions that torch and pickle raise for files that are truncated or have other content."""


@contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """Convert errors of reading a checkpoint to CheckpointDamaged; they come from files without checksums.

    It is raised on every rank, because torch reports the failure of one rank to all of them.
    """
    try:
        yield
    except (CheckpointException, mcore.CheckpointingException) as error:
        failures = [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if isinstance(failures[0], MemoryError | torch.OutOfMemoryError) or not isinstance(failures[0], Exception):
            raise
        raise CheckpointDamaged(f"{directory} cannot be loaded ({failures[0]!r}); restore it, or remove it") from error


def _sharded_state(
    policy: State, critic: State | None, sharding: Mapping[str, Any], *, is_loading: bool, single_experts: bool = False
) -> dict[str, Any]:
    state = _of(policy, sharding, is_loading=is_loading, single_experts=single_experts)
    if critic:
        state["critic"] = _of(critic, sharding, is_loading=is_loading, single_experts=single_experts)
        mcore.add_prefix_for_sharding(state["critic"], "critic.")
    return state


def _of(part: State, sharding: Mapping[str, Any], *, is_loading: bool, single_experts: bool) -> dict[str, Any]:
    model, optimizer = part
    with mcore.quiet():
        weights = model.sharded_state_dict()
        # The optimizer marks shards by the model's entries, so both come from one call.
        held = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(sharding))
        if single_experts and stacked_parameters(model):
            read_single_experts(held, model, optimizer)
    return {"model": weights, "optimizer": held}


def _storages(model: Any, optimizer: Any) -> set[int]:
    """Return the addresses of all storages that a step changes."""
    states = [one.optimizer for one in optimizer.chained_optimizers]
    held = [
        *model.parameters(),
        *(each for state in states for group in state.param_groups for each in group["params"]),
    ]
    held += [value for state in states for own in state.state.values() for value in own.values()]
    return {each.untyped_storage().data_ptr() for each in held if isinstance(each, torch.Tensor)}


def _apart(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    """Return the tensor on the CPU, where no step changes it. It is not copied again if Megatron already has."""
    return tensor.detach().to("cpu", copy=tensor.untyped_storage().data_ptr() in live)
