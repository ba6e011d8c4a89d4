"""Train loops with a session, for tests that disturb them. Every rank writes what each step saw into a ledger."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from prefect_elastic_train import loop
from prefect_elastic_train.rehearsal.checker import largest_difference
from prefect_elastic_train.trackers import tracker as tracker_module
from tests.support.inner_deaths import die_within
from tests.support.ledgers import check_ledger
from tests.support.loops import write_ledger
from tests.support.processes import read_ledger

INPUTS = 8


def data(length: int) -> tuple[Any, Any]:
    """Inputs and targets, the same everywhere."""
    random = np.random.default_rng(7)
    return random.standard_normal((length, INPUTS)), random.standard_normal((length, 1))


def _where() -> dict[str, Any]:
    """Where this rank is, with what tells its worker group from others."""
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context, born = ray.train.get_context(), time.time()
    node = ray.get_runtime_context().get_node_id()
    group = broadcast_from_rank_zero(f"{node} {os.getpid()}")
    found = {
        "pid": os.getpid(),
        "rank": context.get_world_rank(),
        "world": context.get_world_size(),
        "node": node,
        "group": group,
    }
    given = {"address": os.environ.get("RAY_ADDRESS"), "runtime_env": dict(ray.get_runtime_context().runtime_env)}
    return found | given | {"born": born}


def _disturb(config: dict[str, Any], where: dict[str, Any], step: int) -> None:
    """Die where the test wants, once."""
    mark = Path(f"{config.get('ledger')}.{step}")
    if [step, where["rank"]] in config.get("dies", []) and not mark.exists():
        mark.touch()
        os._exit(1)


def _pause(config: dict[str, Any]) -> None:
    """Be as slow as the test wants."""
    if "slow" in config and os.path.exists(config["slow"]):
        time.sleep(config["sleep"])


def _hang(config: dict[str, Any], where: dict[str, Any], step: int) -> None:
    """Wait forever where the test wants, once."""
    mark = Path(f"{config.get('ledger')}.hung")
    if [step, where["rank"]] == config.get("hangs") and not mark.exists():
        mark.touch()
        threading.Event().wait()


def _flip(config: dict[str, Any], where: dict[str, Any], step: int, weights: Any) -> None:
    """Flip bit 40 of the first weight, once, after the step and on the rank in ``config["flips"]``."""
    mark = Path(f"{config.get('ledger')}.flipped")
    if [step, where["rank"]] == config.get("flips") and not mark.exists():
        mark.touch()
        weights.detach().numpy().view("int64")[0] ^= 1 << 40


class _Slow:
    """Wrapper of a function or dataset whose call or read number ``number`` takes ``seconds`` longer."""

    def __init__(self, wrapped: Any, number: int, seconds: float) -> None:
        self._wrapped, self._left, self._seconds = wrapped, number, seconds

    def _wait(self) -> None:
        self._left -= 1
        if self._left == 0:
            time.sleep(self._seconds)

    def __call__(self, *arguments: Any) -> Any:
        self._wait()
        return self._wrapped(*arguments)

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getitem__(self, number: int) -> Any:
        self._wait()
        return self._wrapped[number]


def torch_loop(config: dict[str, Any]) -> None:
    """Fit a small network. A plain function without Ray too: then it is the undisturbed training of one worker.

    Config: ``steps``, ``length`` and ``global_batch`` (samples); ``save_every`` (default: 10); ``recovery_points``
    (default: off); ``dropout``; ``fsdp`` (whether the network is sharded); ``micro_batch``; ``shards`` (default: none);
    ``weights`` (file that rank 0 writes in the end); ``ledger`` (file); ``dies`` (pairs of step and rank that dies
    after it, once); ``dies_within`` (where and from which step on rank 1 dies, see ``inner_deaths``); ``slow`` (file
    while which is there a step takes ``sleep`` seconds longer); ``guard`` (arguments of the guard; default: none);
    ``bad`` (for some steps, the factor of rank 0's loss as text); ``pauses`` (seconds for which the loop sleeps after
    some steps); ``slow_save`` (number of the save, and its delay in seconds); ``slow_sample`` (number of the sample
    read by a rank, and its delay in seconds); ``hangs`` (step and rank that waits forever, once); ``replay_every``;
    ``flips`` (step and rank: after that step, one bit of the rank's weights is flipped, once).
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = dist.get_world_size() if dist.is_initialized() else 1
    where = _where() if "ledger" in config else {"rank": 0}
    if where["rank"] == 1 and config.get("dies_within"):
        die_within(config["dies_within"], config["ledger"])
    layers = [torch.nn.Linear(INPUTS, 16), torch.nn.Tanh(), torch.nn.Dropout(config.get("dropout", 0.0))]
    if "shards" in config:
        layers += [torch.nn.Unflatten(1, (4, 4)), torch.nn.BatchNorm1d(4), torch.nn.Flatten()]
    model: Any = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()
    if config.get("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif world > 1 and "shards" not in config:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    state = loop.TorchState(model=model, optimizer=optimizer, schedule=schedule)
    plan = {"steps": config["steps"], "global_batch": config["global_batch"], "seed": 3}
    dataset: Any = torch.utils.data.TensorDataset(*map(torch.from_numpy, data(config["length"])))
    if "slow_sample" in config:
        dataset = _Slow(dataset, *config["slow_sample"])
    if "slow_save" in config:
        state.stage = _Slow(state.stage, *config["slow_save"])  # type: ignore[method-assign]
    points = config.get("recovery_points", "off")
    plan |= {"save_every": config.get("save_every", 10), "shards": config.get("shards", 0)}
    plan |= {"replay_every": config.get("replay_every", 0)}
    if "guard" in config:
        plan["guard"] = loop.Guard(**config["guard"])
    with loop.session(state, recovery_points=points, **plan) as session:
        seen = list[int]()
        for inputs, targets in session.batches(dataset, micro_batch=config.get("micro_batch", 0)):
            loss = ((model(inputs) - targets) ** 2).mean() * session.weight
            if where["rank"] == 0:
                loss = loss * float(config.get("bad", {}).get(session.done, 1))
            session.backward(loss)
            seen += session.samples.tolist() if session.weight and not session.is_replay else []
            if not session.is_last_part:
                continue
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if "ledger" in config:
                write_ledger(config["ledger"], **where, step=session.done + 1, seen=seen)
            seen = []
            _hang(config, where, session.done)
            _pause(config)
            session.step({"loss": loss})
            _disturb(config, where, session.done)
            _flip(config, where, session.done, layers[0].bias)
            time.sleep(config.get("pauses", {}).get(str(session.done), 0.0))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if where["rank"] == 0:
        np.savez(config["weights"], **{name: value.numpy() for name, value in whole.items()})


def jax_loop(config: dict[str, Any]) -> None:
    """Fit a small network over all processes; ``config`` as that of :func:`torch_loop`, as far as it goes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    where = _where() if "ledger" in config else {"rank": 0, "world": 1}
    assert (jax.process_index(), jax.process_count()) == (where["rank"], where["world"]), "joined in order"
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))

    def on_all(array: Any, sharding: Any = whole) -> Any:
        return jax.make_array_from_process_local_data(sharding, np.asarray(array))

    @jax.jit
    def take_step(weights: dict[str, Any], key: Any, inputs: Any, targets: Any) -> Any:
        key, used = jax.random.split(key)

        def loss_of(weights: dict[str, Any]) -> Any:
            hidden = jnp.tanh(inputs @ weights["inner"])
            kept = jax.random.bernoulli(used, 0.9, hidden.shape)
            return ((hidden * kept @ weights["outer"] - targets) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda old, new: old - 0.05 * new, weights, gradients), key, loss

    random = np.random.default_rng(1)
    first = {"inner": random.standard_normal((INPUTS, 16)) / 4, "outer": random.standard_normal((16, 1)) / 3}
    key = jax.jit(lambda: jax.random.key(5), out_shardings=whole)()
    state = loop.JaxState(weights=jax.tree.map(on_all, first), key=key)
    plan = {"steps": config["steps"], "global_batch": config["global_batch"], "seed": 3}
    points = config.get("recovery_points", "off")
    with loop.session(state, save_every=config.get("save_every", 10), recovery_points=points, **plan) as session:
        for local in session.batches(data(config["length"]), drop_last=True):
            batch = [on_all(one, by_rows) for one in local]
            state.weights, state.key, loss = jax.block_until_ready(take_step(state.weights, state.key, *batch))
            if "ledger" in config:
                write_ledger(config["ledger"], **where, step=session.done + 1, seen=session.samples.tolist())
            _pause(config)
            session.step({"loss": loss})
            _disturb(config, where, session.done)
    if where["rank"] == 0:
        np.savez(config["weights"], **jax.tree.map(np.asarray, state.weights))


def ray_data_loop(config: dict[str, Any]) -> None:
    """Read the shard of a Ray Data dataset with a column ``id``; ``config`` as that of :func:`torch_loop`."""
    import ray.train

    where, shard = _where(), ray.train.get_dataset_shard("train")
    plan = {"steps": config["steps"], "global_batch": config["global_batch"], "save_every": config["save_every"]}
    with loop.session(loop.ArrayState(weights=np.zeros(1)), seed=3, **plan) as session:
        for batch in session.batches(shard):
            assert (batch["twice"] == 2 * batch["id"]).all()
            write_ledger(config["ledger"], **where, step=session.done + 1, seen=batch["id"].tolist())
            _pause(config)
            session.step()


def epoch_loop(config: dict[str, Any]) -> None:
    """Read one epoch of a shard as Ray Train's users do, with a checkpoint of each step, and rank 1 dies once.

    Config: ``ledger``, and ``dies`` (step after which rank 1 dies).
    """
    import ray.train

    where, checkpoint = _where(), ray.train.get_checkpoint()
    state = loop.ArrayState(done=0)
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state.read(directory)
    for batch in ray.train.get_dataset_shard("train").iter_batches(batch_size=10):
        state.done = int(state.done) + 1
        write_ledger(config["ledger"], **where, step=state.done, seen=batch["id"].tolist())
        folder = tempfile.mkdtemp()
        state.stage(folder)()
        ray.train.report({}, checkpoint=ray.train.Checkpoint(folder) if where["rank"] == 0 else None)
        _disturb({"ledger": config["ledger"], "dies": [[config["dies"], 1]]}, where, state.done)


def array_loop(config: dict[str, Any]) -> None:
    """Add up the samples of each step, the same on all ranks; a plain function without Ray, too.

    Config: ``steps``, ``save_every``, ``weights`` and ``ledger`` as those of :func:`torch_loop`; ``global_batch``
    (default: 8); ``sleep`` (seconds of a step); ``upload_seconds`` (by which ranks other than 0 are slower to store a
    checkpoint once their node is drained); ``dies`` (True: they die in the middle of that instead).
    """
    where = _where() if "ledger" in config else {"rank": 0}
    if where["rank"]:
        _upload_slowly(config["upload_seconds"], config["dies"])
    size = config.get("global_batch", 8)
    (values, _), order = data(64), loop.SampleOrder(64, size, 1)
    state, every = loop.ArrayState(weights=np.zeros(INPUTS)), config["save_every"]
    with loop.session(state, steps=config["steps"], global_batch=size, seed=1, save_every=every) as session:
        for _ in session.batches(values):
            # Of all ranks' samples, so that nothing need be sent to the others.
            state.weights = state.weights * 0.99 + values[order.indices(session.done)].sum(0)
            if "ledger" in config:
                write_ledger(config["ledger"], **where, step=session.done + 1, seen=session.samples.tolist())
                time.sleep(config["sleep"])
            session.step()
    if where["rank"] == 0:
        np.savez(config["weights"], weights=state.weights)


def _upload_slowly(seconds: float, dies: bool, always: bool = False) -> None:
    from ray.train.v2._internal.execution.context import get_train_context

    context = get_train_context()
    persist = context.storage_context.persist_current_checkpoint

    def slowly(checkpoint: Any, name: str) -> Any:
        if always or context.preemption_context.preemption_info is not None:
            time.sleep(seconds)
            if dies:
                os._exit(1)
        return persist(checkpoint, name)

    context.storage_context.persist_current_checkpoint = slowly


def problems(ledger: str | Path, steps: int, length: int) -> list[str]:
    """What is wrong with the steps and samples of a ledger, however many steps were done again."""
    return check_ledger(read_ledger(ledger), steps, length, most_redone=steps).problems


def same_weights(one: str | Path, other: str | Path, relative: float = 0.0) -> bool:
    """Whether the weights of two trainings are the same, bit for bit or nearly."""
    with np.load(one) as first, np.load(other) as second:
        assert sorted(first) == sorted(second)
        return largest_difference(dict(first), dict(second)).size <= relative


def misusing_loop(config: dict[str, Any]) -> None:
    """Use sessions wrongly in several ways on two workers, one after the other, and write what each rank is told.

    In the end one rank leaves early. Each but the second session begins as in a new worker process.
    """
    import ray.train

    from prefect_elastic_train.loop import training_session

    rank = ray.train.get_context().get_world_rank()

    def told(what: str, use: Any) -> None:
        try:
            use()
            found = "nothing"
        except Exception as error:  # which of them is what is to be seen
            found = f"{type(error).__name__}: {error}"
        write_ledger(config["ledger"], what=what, rank=rank, found=found)

    def train(length: int = 20, steps: int = 4, until: int = 100, again: bool = False, **more: Any) -> None:
        training_session.current = training_session.current if again else None
        state = loop.TorchState(weights=torch.nn.Linear(1, 1))
        with loop.session(state, steps=steps, **{"global_batch": 4, "save_every": 100, **more}) as session:
            for _ in session.batches(np.arange(length)):
                if session.done == until:
                    break
                session.step()

    def wait_for_checkpoint(step: int) -> None:
        """Wait until this rank knows of the checkpoint: the ranks learn of it at different times."""
        for _ in range(300):
            checkpoint = ray.train.get_checkpoint()
            if checkpoint and training_session.read_about(checkpoint.path)["step"] == step:
                return
            time.sleep(0.1)

    import torch

    told("an early end on all ranks", lambda: train(until=3))
    wait_for_checkpoint(3)
    told("another length", lambda: train(length=21))
    told("another order", lambda: train(seed=1))
    told("all as before", lambda: train(steps=5))
    wait_for_checkpoint(5)
    told("a second session", lambda: train(again=True))
    train(steps=9, until=7 if rank else 100)


def score_of(weights: float) -> float:
    """The score that an evaluation finds: the best one is of step 30."""
    return abs(weights - 30) / 100 + 0.1


def evaluating_loop(config: dict[str, Any]) -> None:
    """Train weights that are the number of their step, and evaluate them after each tenth step.

    Config: ``steps``; ``save_every``; ``recovery_points``; ``dies`` (pairs of step and rank that dies while it
    evaluates, once); ``ledger``.
    """
    import ray.train

    where = {"rank": ray.train.get_context().get_world_rank()}
    state = loop.ArrayState(weights=0.0)
    plan = {"steps": config["steps"], "global_batch": 4, "save_every": config["save_every"]}
    with loop.session(state, **plan, recovery_points=config["recovery_points"]) as session:
        for _ in session.batches(np.arange(40)):
            state.weights += 1
            time.sleep(0.02)
            session.step({"loss": 1.0})
            write_ledger(config["ledger"], **where, step=session.done)
            if session.done % 10 == 0:
                _disturb(config, where, session.done)
                session.save({"val_loss": score_of(float(state.weights))})


def tracked_loop(config: dict[str, Any]) -> None:
    """Take steps whose loss differs each time that they are taken, and show them in trackers.

    Then write the trackers that are not finished into ``<ledger>.unfinished``.

    Config: ``steps``; ``save_every``; ``sleep`` (seconds a step); ``trackers`` (arguments of ``loop.track``);
    ``ledger`` (file, of rank 0); ``dies`` ([[step, rank]], once each); ``upload_seconds`` (duration of an upload of
    another rank); ``close_seconds`` (time limit of trackers at the end).
    """
    tracker_module._CLOSE_SECONDS = config.get("close_seconds", tracker_module._CLOSE_SECONDS)
    tracker = loop.track(**config["trackers"])
    state = loop.ArrayState(weights=np.zeros(1))
    plan = {"steps": config["steps"], "global_batch": 4, "save_every": config["save_every"]}
    with loop.session(state, tracker=tracker, **plan) as session:
        if session.rank and "upload_seconds" in config:
            _upload_slowly(config["upload_seconds"], False, always=True)
        for _ in session.batches(np.arange(64)):
            time.sleep(config["sleep"])
            loss = time.time()
            if session.rank == 0:
                write_ledger(config["ledger"], rank=0, step=session.done + 1, loss=loss)
            session.step({"loss": loss})
            _disturb(config, {"rank": session.rank}, session.done)
    if session.rank == 0:
        unfinished = [sender.name for sender in tracker._senders if sender.is_alive()]
        Path(f"{config['ledger']}.unfinished").write_text(" ".join(unfinished))
