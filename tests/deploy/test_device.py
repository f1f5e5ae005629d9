"""A device: what it says of itself, what it trains, and that nothing is lost when it is switched off."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray
from safetensors import safe_open

from safa.deploy.exchange import device as device_module
from safa.deploy.exchange.codec import CodecName, EncodedTensor, add_delta, decode, encode, spec_of
from safa.deploy.exchange.device import FILE, Device
from safa.deploy.exchange.messages import Failure, JoinReply, JoinRequest, ModelMissing, TrainRequest, Update, digest_of
from safa.deploy.exchange.screening import Rejected
from safa.deploy.flower.client_app import app
from safa.deploy.flower.records import read_join_reply, read_train_reply, to_records
from safa.experiments.simulate import fleet_of
from safa.fleet import make_fleet
from safa.runs.settings import Settings
from safa.tasks import load_problem
from safa.training import Attempt, BatchedTrainer, Layout, Optimiser
from safa.training.setup import local_training, make_shards

ROOT = Path(__file__).parent.parent.parent
EPOCHS = 4
OPTIMISERS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"proximal": 0.5},
    {"optimiser": "adam", "lr": 0.01},
]

Tensors = dict[str, NDArray[Any]]


def settings_of(**given: Any) -> Settings:
    return Settings.of("boston", **{"epochs": EPOCHS, "seed": 3} | given)


def config_of(**given: Any) -> str:
    return settings_of(**given).to_toml()


def start_tensors(seed: int = 3, task: str = "boston") -> Tensors:
    """A model to start from; that of boston would be all zeros."""
    draw = np.random.default_rng(seed)
    state = load_problem(task).start_model(0).state_dict()
    return {name: draw.normal(0.0, 0.1, tensor.shape).astype(np.float32) for name, tensor in state.items()}


def request_of(
    start: Tensors | None = None, *, model: bool = True, kind: CodecName = "float32", **given: Any
) -> TrainRequest:
    """An request to train from these tensors."""
    encoded = encode(start or start_tensors(), kind)
    decoded = decode(encoded, spec_of(start or start_tensors()))
    assert not isinstance(decoded, Rejected)
    values: dict[str, Any] = {
        "deployment": "trial",
        "attempt": 1,
        "version": 0,
        "digest": digest_of(decoded),
        "own": False,
        "codec": kind,
        "config": config_of(),
        "client": 0,
        "round": 1,
        "model": encoded if model else None,
    }
    return TrainRequest(**values | given)


def updated(answer: Update | ModelMissing | Failure) -> Tensors:
    """The model in an answer that was sent as float32."""
    assert isinstance(answer, Update), answer
    tensors = decode(answer.encoded, spec_of(start_tensors()))
    assert not isinstance(tensors, Rejected)
    return tensors


def failed(answer: object) -> str:
    assert isinstance(answer, Failure), answer
    assert "\n" not in answer.why
    return answer.why


def expected(settings: Settings, shard: NDArray[np.int64], start: Tensors) -> Tensors:
    """What a simulation makes of a start model."""
    problem = load_problem(settings.task)
    optimiser = Optimiser(
        kind=settings.optimiser,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        proximal=settings.proximal,
    )
    trainer = BatchedTrainer(
        problem, [shard], batch_size=settings.batch_size, optimiser=optimiser, device=torch.device("cpu")
    )
    row = trainer.layout.row({name: torch.from_numpy(tensor) for name, tensor in start.items()})
    update = trainer.train(np.array([0]), row[None], epochs=settings.epochs)[0]
    return {name: tensor.numpy() for name, tensor in trainer.layout.state(update).items()}


def shard_of(settings: Settings, partition: int) -> NDArray[np.int64]:
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    return make_shards(settings, load_problem(settings.task), sizes)[partition]


def held(folder: Path) -> dict[str, Any]:
    """What stands in a state file, as far as tests look at it."""
    with safe_open(folder / FILE, framework="pt") as file:
        head: dict[str, Any] = json.loads(file.metadata()["head"])
        return head | {"done": int(file.get_tensor("attempt.done"))}


class SwitchedOffError(BaseException):
    """The device has no power any more; nothing may catch this."""


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Counts epochs, and switches the device off after as many as are left."""
    meter = SimpleNamespace(done=0, left=10**9)
    train = Attempt.epoch

    def epoch(self: Attempt) -> None:
        if meter.left == 0:
            raise SwitchedOffError
        meter.left, meter.done = meter.left - 1, meter.done + 1
        train(self)

    monkeypatch.setattr(Attempt, "epoch", epoch)
    return meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only sleeping moves."""
    hands = SimpleNamespace(now=1000.0)

    def sleep(seconds: float) -> None:
        hands.now += seconds

    monkeypatch.setattr(device_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: hands.now))
    return hands


def switched_off(device: Device, request: TrainRequest, meter: SimpleNamespace, *, after_epochs: int) -> None:
    """Let a device begin, and switch it off in the middle."""
    meter.left = after_epochs
    with pytest.raises(SwitchedOffError):
        device.train(request)
    meter.left, meter.done = 10**9, 0


# -- the amount of work ----------------------------------------------------------------------------------------------

WORK: list[dict[str, Any]] = [
    {"shuffle": True},
    {"local_steps": 30},
    {"schedule": "cosine"},
    {"optimiser": "adamw", "weight_decay": 0.1, "lr": 0.01, "clip": 0.5},
    {"momentum": 0.9, "nesterov": True, "shuffle": True, "local_steps": 70},
]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("given", WORK, ids=str)
def test_a_device_trains_as_a_simulation_does(
    given: dict[str, Any], own: bool, tmp_path: Path, epochs: SimpleNamespace
) -> None:
    """It is switched off in the middle, and asked for a part of the work that a simulated client is asked for."""
    settings = Settings.of("boston", seed=3, **given)
    problem, start = load_problem("boston"), start_tensors()
    layout = Layout(problem.start_model(0))
    shards = [shard_of(settings, part) for part in range(settings.clients)]
    simulated = local_training(settings, problem, shards, torch.device("cpu"), own_models=own)
    row = layout.row({name: torch.from_numpy(tensor) for name, tensor in start.items()})
    clients, bases, rounds, work = np.array([2]), np.array([7]), np.array([9]), np.array([0.6])
    wanted = simulated.updates(clients, bases, row[None], rounds=rounds, work=work)[0]
    request = request_of(start, version=7, round=9, client=2, work=0.6, own=own, config=settings.to_toml())
    device = Device("ann", tmp_path, partition=2, save_every_s=0.0)
    switched_off(device, request, epochs, after_epochs=1)
    got = updated(device.train(replace(request, model=None, attempt=2)))
    found = layout.row({name: torch.from_numpy(tensor) for name, tensor in got.items()})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert (wanted - row).abs().max() > 1e-3


def test_another_share_of_the_work_is_another_request(tmp_path: Path) -> None:
    device = Device("ann", tmp_path, partition=2)
    half, whole = (updated(device.train(request_of(work=work, model=work < 1))) for work in (0.5, 1.0))
    assert any(not np.array_equal(half[name], whole[name]) for name in half)
    assert held(tmp_path)["work"] == 1.0


@pytest.mark.parametrize("given", [{"shuffle": True}, {"schedule": "cosine"}], ids=str)
def test_the_same_model_in_a_later_round_is_another_request_where_that_counts(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """A round that changes nothing makes a version that is equal to the one before."""
    device, config = Device("ann", tmp_path, partition=2), config_of(**given)
    first = updated(device.train(request_of(config=config)))
    second = updated(device.train(request_of(config=config, version=7, round=8, model=False)))
    assert any(not np.array_equal(first[name], second[name]) for name in first)
    assert held(tmp_path)["version"] == 7


def test_a_schedule_of_ones_own_is_refused(tmp_path: Path) -> None:
    why = "a schedule of your own cannot be deployed: devices do not import os.path:exists"
    config = config_of(schedule="warmup:3+os.path:exists")
    assert failed(Device("ann", tmp_path).train(request_of(config=config))) == why
    assert failed(Device("ann", tmp_path).join(JoinRequest(deployment="t", config=config))) == why


# -- introductions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contiguous", "dirichlet:0.5", "shards:2"])
def test_a_device_declares_the_size_of_its_part_of_the_data(kind: str, tmp_path: Path) -> None:
    settings = settings_of(partition=kind)
    invitation = JoinRequest(deployment="trial", config=settings.to_toml())
    for part in range(settings.clients):
        said = Device("ann", tmp_path, partition=part).join(invitation)
        assert said == JoinReply(name="ann", size=len(shard_of(settings, part)), details={"partition": part})


def test_a_device_knows_who_is_slow_unless_a_file_says_so(tmp_path: Path) -> None:
    settings = settings_of(partition="rare:3", fleet="two-speed")
    sizes = fleet_of(settings).sizes
    for part in range(settings.clients):
        said = Device("ann", tmp_path, partition=part).join(JoinRequest(deployment="t", config=settings.to_toml()))
        assert isinstance(said, JoinReply)
        assert said.size == sizes[part]
    config = config_of(partition="rare:3", speeds="speeds.txt")
    answer = Device("ann", tmp_path, partition=1).join(JoinRequest(deployment="t", config=config))
    assert failed(answer) == "the partition rare needs the speeds of the clients, which are not known here"


def test_without_a_partition_all_data_are_its_own(tmp_path: Path) -> None:
    said = Device("ann", tmp_path).join(JoinRequest(deployment="trial", config=config_of()))
    assert said == JoinReply(name="ann", size=len(load_problem("boston").train[0]), details={})
    answer = Device("ann", tmp_path).train(request_of())
    everything = np.arange(len(load_problem("boston").train[0]))
    assert digest_of(updated(answer)) == digest_of(expected(settings_of(), everything, start_tensors()))


@pytest.mark.parametrize("part", [-1, 5, 10**30])
def test_a_partition_that_does_not_exist_is_a_failure(part: int, tmp_path: Path) -> None:
    device = Device("ann", tmp_path, partition=part)
    for answer in (device.join(JoinRequest(deployment="t", config=config_of())), device.train(request_of())):
        assert failed(answer) == f"this device is for partition {part} of the data, but there are 5, counted from 0"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("= 3", "cannot be used here: Invalid"),
        ('task = "boston"', "not those of this version of safa"),
        ("colour = 3\n" + config_of(), "not those of this version of safa"),
        (config_of().replace("epochs = 4", "epochs = -4"), "epochs must be at least 1, not -4"),
        (config_of().replace("epochs = 4", f"epochs = 1{'0' * 400}"), "cannot be used here"),
        (config_of().replace('"safa"', '"mine"'), "there is no protocol 'mine'"),
        (config_of().replace('"boston"', '["boston"]'), "task must be text, not ['boston']"),
    ],
)
def test_settings_that_cannot_be_used_are_a_failure(config: str, why: str, tmp_path: Path) -> None:
    device = Device("ann", tmp_path)
    assert why in failed(device.join(JoinRequest(deployment="t", config=config)))
    assert why in failed(device.train(request_of(config=config)))


def test_only_the_device_says_whose_code_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought_along.py").write_text(
        "from pathlib import Path\n"
        "Path('imported').touch()\n"
        "from safa.tasks import load_problem\n"
        "mine = load_problem('boston')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = "brought_along:mine"
    config = config_of().replace('"boston"', f'"{task}"')
    invitation = JoinRequest(deployment="trial", config=config)
    assert "must be named on the device, too" in failed(Device("ann", tmp_path).join(invitation))
    told_another = Device("ann", tmp_path, task="boston").join(invitation)
    assert failed(told_another) == f"this device is for the task 'boston', but the server's is {task!r}"
    assert not (tmp_path / "imported").exists()
    device = Device("ann", tmp_path, task=task)
    assert isinstance(device.join(invitation), JoinReply)
    assert (tmp_path / "imported").exists()
    assert isinstance(device.train(request_of(config=config)), Update)
    assert f"for the task {task!r}" in failed(device.join(JoinRequest(deployment="trial", config=config_of())))


def test_a_device_reads_no_file_that_it_does_not_need_and_tells_nothing_of_those_it_reads(tmp_path: Path) -> None:
    device = Device("ann", tmp_path, partition=1)
    said = device.join(JoinRequest(deployment="trial", config=config_of()))
    elsewhere = config_of(speeds="/nowhere/a", links="/nowhere/b", trace="/nowhere/c")
    assert device.join(JoinRequest(deployment="trial", config=elsewhere)) == said
    secret = tmp_path / "secret"
    secret.write_text("my diary\n" * 5)
    why = failed(device.join(JoinRequest(deployment="trial", config=config_of(sizes=str(secret)))))
    assert why == f"the device has no file of sizes {secret} that it could use"
    secret.write_text("10\n20\n30\n40\n50\n")
    there = device.join(JoinRequest(deployment="trial", config=config_of(sizes=str(secret))))
    assert isinstance(there, JoinReply)
    assert there.size == len(shard_of(settings_of(sizes=str(secret)), 1))


def test_a_device_loads_no_torch_before_it_needs_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import safa.deploy.flower.client_app; "
        "from safa.deploy.exchange.device import Device; "
        "from safa.deploy.exchange.messages import JoinRequest; "
        f"print(Device('a', Path({str(tmp_path)!r}), task='x').join(JoinRequest(deployment='t', config='')).why); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the server's settings are not those of this version of safa", "False"]


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", OPTIMISERS, ids=str)
def test_an_update_is_what_a_simulation_trains(given: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(**given)
    request = request_of(attempt=7, version=3, config=settings.to_toml())
    answer = Device("ann", tmp_path, partition=2).train(request)
    wanted = expected(settings, shard_of(settings, 2), start_tensors())
    assert digest_of(updated(answer)) == digest_of(wanted) != request.digest
    assert isinstance(answer, Update)
    assert (answer.attempt, answer.version) == (7, 3)
    assert answer.seconds > 0


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_short_codec_sends_the_delta_from_the_model_as_it_arrived(kind: CodecName, tmp_path: Path) -> None:
    request = request_of(kind=kind)
    assert request.model is not None
    base = decode(request.model, spec_of(start_tensors()))
    assert not isinstance(base, Rejected)
    answer = Device("ann", tmp_path, partition=2).train(request)
    assert isinstance(answer, Update)
    exact = expected(settings_of(), shard_of(settings_of(), 2), base)
    assert answer.encoded == encode({name: exact[name] - base[name] for name in base}, kind)
    changed = decode(answer.encoded, spec_of(base))
    assert not isinstance(changed, Rejected)
    received = add_delta(changed, base)
    assert all(np.allclose(received[name], exact[name], atol=1e-4) for name in exact)


def test_whole_numbers_of_a_model_are_sent_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.problems import make

    (tmp_path / "with_counters.py").write_text(
        "from tests.training.problems import make\ndef mine(): return make('batch norm')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = make("batch norm").start_model(3)
    start = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    start["1.num_batches_tracked"] = np.array(1000)
    config = config_of(batch_size=8, epochs=1).replace('"boston"', '"with_counters:mine"')
    answer = Device("ann", tmp_path, task="with_counters:mine").train(request_of(start, kind="int8", config=config))
    assert isinstance(answer, Update)
    found = decode(answer.encoded, spec_of(start))
    assert not isinstance(found, Rejected)
    assert found["1.num_batches_tracked"] == 1000 + 200 // 8


def test_a_model_that_is_not_what_its_digest_says_is_a_failure(tmp_path: Path) -> None:
    request = replace(request_of(version=4), digest=digest_of(start_tensors(seed=4)))
    why = failed(Device("ann", tmp_path).train(request))
    assert why == "the server's model of version 4 is not the one that its digest names"
    assert not (tmp_path / FILE).exists()


def test_a_model_of_another_kind_is_a_failure(tmp_path: Path) -> None:
    request = request_of(model=False)
    for tensors in ({}, {"0.weight": EncodedTensor(dtype="float32", shape=(1,), data=bytes(4))}):
        strange = replace(request, model=replace(encode({}, "float32"), tensors=tensors))
        assert "the server's model does not fit this task" in failed(Device("ann", tmp_path).train(strange))


def test_what_cannot_be_sent_is_a_failure(tmp_path: Path) -> None:
    diverging = config_of(lr=1e30)
    why = failed(Device("ann", tmp_path).train(request_of(kind="int8", config=diverging)))
    assert "holds a NaN or an infinite number, which int8 does not have" in why
    assert "a codec is one of" in failed(Device("ann", tmp_path).train(request_of(codec="int4")))


def test_a_place_to_train_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    assert "there is no device 'meta:x'" in failed(
        Device("ann", tmp_path).train(request_of(config=config_of(device="meta:x")))
    )


# -- switched off and on again ---------------------------------------------------------------------------------------


def test_without_the_model_it_asks_for_it(tmp_path: Path) -> None:
    assert Device("ann", tmp_path).train(request_of(attempt=9, model=False)) == ModelMissing(attempt=9)
    assert Device("ann", tmp_path).train(request_of(attempt=9, own=True, model=False)) == ModelMissing(attempt=9)


@pytest.mark.parametrize("given", OPTIMISERS, ids=str)
@pytest.mark.parametrize("off_after", range(EPOCHS))
def test_a_device_that_was_switched_off_continues_where_it_was(
    given: dict[str, Any], off_after: int, tmp_path: Path, epochs: SimpleNamespace
) -> None:
    request = request_of(config=config_of(**given))
    whole = Device("ann", tmp_path / "whole", partition=1).train(request)
    switched_off(Device("bob", tmp_path, partition=1, save_every_s=0), request, epochs, after_epochs=off_after)
    assert held(tmp_path)["done"] == off_after
    again = replace(request, attempt=2, model=None)
    answer = Device("bob", tmp_path, partition=1).train(again)
    assert isinstance(whole, Update)
    assert isinstance(answer, Update)
    assert answer.attempt == 2
    assert answer.encoded == whole.encoded
    assert epochs.done == EPOCHS - off_after


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_nor_does_a_narrow_wire_make_a_difference(kind: CodecName, tmp_path: Path, epochs: SimpleNamespace) -> None:
    request = request_of(kind=kind)
    whole = Device("ann", tmp_path / "whole").train(request)
    switched_off(Device("bob", tmp_path, save_every_s=0), request, epochs, after_epochs=2)
    answer = Device("bob", tmp_path).train(request)
    assert isinstance(whole, Update)
    assert isinstance(answer, Update)
    assert answer.encoded == whole.encoded


def test_what_is_finished_is_answered_at_once(tmp_path: Path, epochs: SimpleNamespace) -> None:
    first = Device("ann", tmp_path).train(request_of())
    assert isinstance(first, Update)
    before = (tmp_path / FILE).read_bytes()
    epochs.left = 0
    # After a restart of the server the same model may have another version number, and its encoded may be left out.
    for model in (True, False):
        answer = Device("ann", tmp_path).train(request_of(attempt=5, version=8, model=model))
        assert answer == replace(first, attempt=5, version=8)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_new_model_is_begun_anew_whatever_its_version(tmp_path: Path, epochs: SimpleNamespace) -> None:
    device = Device("ann", tmp_path, save_every_s=0)
    switched_off(device, request_of(version=3), epochs, after_epochs=2)
    other = start_tensors(seed=4)
    answer = device.train(request_of(other, version=3))
    everything = np.arange(len(load_problem("boston").train[0]))
    assert digest_of(updated(answer)) == digest_of(expected(settings_of(), everything, other))
    assert device.train(request_of(version=3, model=False)) == ModelMissing(attempt=1)


def test_what_was_kept_for_another_deployment_is_of_no_use(tmp_path: Path, epochs: SimpleNamespace) -> None:
    device = Device("ann", tmp_path)
    result = updated(device.train(request_of()))
    assert device.train(request_of(deployment="another", model=False)) == ModelMissing(attempt=1)
    assert device.train(request_of(result, deployment="another", own=True, model=False)) == ModelMissing(attempt=1)
    assert held(tmp_path)["deployment"] == "trial"
    epochs.done = 0
    assert digest_of(updated(device.train(request_of(deployment="another")))) == digest_of(result)
    assert epochs.done == EPOCHS


def test_fully_local_training_continues_from_the_last_update(tmp_path: Path, epochs: SimpleNamespace) -> None:
    everything = np.arange(len(load_problem("boston").train[0]))
    current = start_tensors()
    answer = Device("ann", tmp_path).train(request_of(own=True))
    for version in range(1, 4):
        current = expected(settings_of(), everything, current)
        assert digest_of(updated(answer)) == digest_of(current)
        request = request_of(current, own=True, version=version, model=False)
        switched_off(Device("ann", tmp_path, save_every_s=0), request, epochs, after_epochs=version)
        answer = Device("ann", tmp_path).train(request)
        assert epochs.done == EPOCHS - version
        epochs.done = 0
        assert Device("ann", tmp_path).train(request) == answer  # asked once more
        assert epochs.done == 0


def test_an_own_update_is_no_start_unless_it_was_asked_for(tmp_path: Path, epochs: SimpleNamespace) -> None:
    device = Device("ann", tmp_path, save_every_s=0)
    result = updated(device.train(request_of()))
    assert device.train(request_of(result, model=False)) == ModelMissing(attempt=1)
    assert isinstance(device.train(request_of(start_tensors(4))), Update)
    assert device.train(request_of(result, own=True, model=False)) == ModelMissing(attempt=1)
    switched_off(device, request_of(start_tensors(5)), epochs, after_epochs=2)
    with safe_open(tmp_path / FILE, framework="pt") as file:
        row = file.get_tensor("attempt.row")
    halfway = {name: t.numpy() for name, t in Layout(load_problem("boston").start_model(0)).state(row).items()}
    assert device.train(request_of(halfway, own=True, model=False)) == ModelMissing(attempt=1)


def test_an_unfinished_job_of_another_optimiser_is_begun_anew(
    tmp_path: Path, clock: SimpleNamespace, epochs: SimpleNamespace
) -> None:
    device = Device("ann", tmp_path, pause_s=4.0)
    switched_off(device, request_of(), epochs, after_epochs=2)
    adam = settings_of(optimiser="adam")
    answer = device.train(request_of(config=adam.to_toml(), model=False))
    everything = np.arange(len(load_problem("boston").train[0]))
    assert digest_of(updated(answer)) == digest_of(expected(adam, everything, start_tensors()))
    assert isinstance(answer, Update)
    assert answer.seconds == 4.0


def test_what_was_kept_of_a_smaller_model_is_of_no_use(tmp_path: Path) -> None:
    device = Device("ann", tmp_path)
    assert isinstance(device.train(request_of()), Update)
    config = Settings.of("digits", epochs=1).to_toml()
    assert device.train(request_of(own=True, model=False, config=config)) == ModelMissing(attempt=1)
    assert isinstance(device.train(request_of(start_tensors(task="digits"), own=True, config=config)), Update)


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_as_none_wherever_the_damage_is(tmp_path: Path) -> None:
    device, path = Device("ann", tmp_path), tmp_path / FILE
    whole = device.train(request_of())
    content = path.read_bytes()
    for place in range(0, len(content), 5):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert device.train(request_of(model=False)) == ModelMissing(attempt=1), place
        path.write_bytes(content[:place])
        assert device.train(request_of(model=False)) == ModelMissing(attempt=1), place
    answer = device.train(request_of())
    assert isinstance(whole, Update)
    assert isinstance(answer, Update)
    assert answer.encoded == whole.encoded
    assert held(tmp_path)["finished"] is True


def strange_files() -> Iterator[Callable[[Path], object]]:
    from safetensors.torch import save

    yield lambda path: path.write_bytes(b"")
    yield lambda path: path.write_bytes(save({}))
    yield lambda path: path.write_bytes(save({"base": torch.zeros(3)}, metadata={"head": "{}", "check": ""}))
    yield lambda path: Device("ann", path.parent).train(
        request_of(start_tensors(task="digits"), config=Settings.of("digits", epochs=1, clients=1).to_toml())
    )


@pytest.mark.parametrize("make", list(strange_files()))
def test_a_file_of_another_kind_or_model_is_overwritten(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / FILE)
    assert (tmp_path / FILE).exists()
    assert Device("ann", tmp_path).train(request_of(model=False)) == ModelMissing(attempt=1)
    assert isinstance(Device("ann", tmp_path).train(request_of()), Update)
    assert held(tmp_path)["digest"] == request_of().digest


def test_a_device_that_cannot_write_says_so(tmp_path: Path) -> None:
    (tmp_path / "ann").write_text("in the way")
    why = failed(Device("ann", tmp_path / "ann").train(request_of()))
    assert why.startswith(f"the device cannot write {tmp_path / 'ann' / FILE}: ")


def test_short_epochs_are_not_written_down(tmp_path: Path, clock: SimpleNamespace, epochs: SimpleNamespace) -> None:
    for folder, every_s, kept in (("a", 0.5, 3), ("b", 1.0, 3), ("c", 1.5, 2), ("d", 4.0, 0)):
        device = Device("ann", tmp_path / folder, pause_s=4.0, save_every_s=every_s)
        switched_off(device, request_of(), epochs, after_epochs=3)
        assert held(tmp_path / folder)["done"] == kept
        device.train(request_of())
        assert epochs.done == EPOCHS - kept
        assert held(tmp_path / folder)["finished"] is True


def test_the_pause_is_spread_and_not_begun_anew(
    tmp_path: Path, clock: SimpleNamespace, epochs: SimpleNamespace
) -> None:
    began = clock.now
    whole = Device("ann", tmp_path / "whole", pause_s=8.0).train(request_of())
    assert isinstance(whole, Update)
    assert whole.seconds == clock.now - began == 8.0
    device = Device("ann", tmp_path, pause_s=8.0)
    switched_off(device, request_of(), epochs, after_epochs=3)
    assert held(tmp_path)["seconds"] == 6.0
    clock.now += 100.0  # it is off for a while
    began = clock.now
    answer = device.train(request_of())
    assert clock.now - began == 2.0
    assert answer == whole


# -- a real end ------------------------------------------------------------------------------------------------------

ADAM = {"optimiser": "adam", "lr": 0.01, "epochs": 100}


def work_slowly(folder: str) -> None:
    """What the process does that is killed: 100 epochs in a quarter of a minute."""
    Device("ann", Path(folder), partition=1, pause_s=15.0, save_every_s=0).train(request_of(config=config_of(**ADAM)))


@pytest.mark.slow
def test_a_process_that_is_killed_is_taken_up_to_the_same_bytes(tmp_path: Path) -> None:
    code = f"from tests.deploy.test_device import work_slowly; work_slowly({str(tmp_path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        give_up = time.monotonic() + 120
        while not (tmp_path / FILE).exists() or held(tmp_path)["done"] < 3:
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = held(tmp_path)
    assert 3 <= kept["done"] < 100
    assert not kept["finished"]
    assert kept["seconds"] >= 0.15 * kept["done"]
    request = request_of(config=config_of(**ADAM))
    whole = Device("ann", tmp_path / "whole", partition=1).train(request)
    answer = Device("ann", tmp_path, partition=1).train(replace(request, model=None))
    assert isinstance(whole, Update)
    assert isinstance(answer, Update)
    assert answer.encoded == whole.encoded
    assert answer.seconds > kept["seconds"]


# -- as a Flower app -------------------------------------------------------------------------------------------------


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordDict]:
    """Sends a message to the app, as Flower does, and returns the content of its reply."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    def send(sent: JoinRequest | TrainRequest | RecordDict, kind: str, **config: Any) -> RecordDict:
        content = sent if isinstance(sent, RecordDict) else to_records(sent)
        message = Message(content, dst_node_id=7, message_type=kind)
        node_config = {name.replace("_", "-"): value for name, value in config.items()}
        context = Context(run_id=1, node_id=7, node_config=node_config, state=RecordDict(), run_config={})
        reply = app(message, context)
        assert (reply.metadata.dst_node_id, reply.metadata.src_node_id) == (1, 7)
        return reply.content

    return send


def test_the_app_joins_and_trains(ask: Callable[..., RecordDict], tmp_path: Path) -> None:
    config = {"name": "ann", "state": str(tmp_path / "a"), "task": "boston", "partition_id": 2, "pause_s": 0}
    said = read_join_reply(ask(JoinRequest(deployment="trial", config=config_of()), "query", **config))
    size = len(shard_of(settings_of(), 2))
    assert said == JoinReply(name="ann", size=size, details={"partition": 2})
    answer = read_train_reply(ask(request_of(), "train", **config))
    assert isinstance(answer, Update)
    direct = Device("ann", tmp_path / "b", partition=2).train(request_of())
    assert isinstance(direct, Update)
    assert answer.encoded == direct.encoded
    assert read_train_reply(
        ask(request_of(start_tensors(4), attempt=3, model=False), "train", **config)
    ) == ModelMissing(attempt=3)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"state": "here"}, "the node config of the device lacks name"),
        ({"name": "ann"}, "the node config of the device lacks state"),
        ({"name": 7, "state": "here"}, "name in the node config must be text, not 7"),
        ({"name": "ann", "state": ""}, "state in the node config must be text, not ''"),
        ({"name": "ann", "state": "here", "task": True}, "task in the node config must be text, not True"),
        (
            {"name": "ann", "state": "here", "partition_id": "2"},
            "partition-id in the node config must be a whole number, not '2'",
        ),
        (
            {"name": "ann", "state": "here", "pause_s": -1.0},
            "pause-s in the node config must be a number of seconds, not -1.0",
        ),
        (
            {"name": "ann", "state": "here", "pause_s": True},
            "pause-s in the node config must be a number of seconds, not True",
        ),
    ],
)
def test_a_node_config_that_cannot_be_used_is_answered(
    config: dict[str, Any], why: str, ask: Callable[..., RecordDict]
) -> None:
    invitation = JoinRequest(deployment="trial", config=config_of())
    assert read_join_reply(ask(invitation, "query", **config)) == Failure(why=why)
    assert read_train_reply(ask(request_of(), "train", **config)) == Failure(why=why)


def test_a_message_of_another_kind_is_answered(ask: Callable[..., RecordDict], tmp_path: Path) -> None:
    answer = read_train_reply(ask(RecordDict(), "train", name="ann", state=str(tmp_path)))
    assert "the server's message cannot be read" in failed(answer)


def test_what_nobody_expected_is_answered_in_one_sentence(
    ask: Callable[..., RecordDict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(task: str) -> None:
        raise RuntimeError("a secret\nTraceback (most recent call last): ...")

    monkeypatch.setattr(device_module, "load_problem", broken)
    answer = read_train_reply(ask(request_of(), "train", name="ann", state=str(tmp_path)))
    assert answer == Failure(why="the device failed with a RuntimeError; see its log")
