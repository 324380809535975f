"""Commands that compute nothing start without PyTorch, and names of the package are imported when they are used."""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import typer

import fedh2l
from fedh2l.cli.app import COMMANDS, app, load_command
from fedh2l.data.registry import DATASETS
from fedh2l.experiment.presets import ARCHITECTURES
from fedh2l.methods.registry import METHODS
from fedh2l.models.registry import MODELS

MOST = 2.5
"""How many times as long as importing what they stand on the commands' help may take."""
SPY = """
import sys
from fedh2l.cli import main

sys.argv = ["fedh2l", *sys.argv[1:]]
try:
    main()
finally:
    print("heavy:", sorted({"torch", "numpy", "scipy"} & set(sys.modules)), file=sys.stderr)
"""


def started(*arguments, **options) -> subprocess.CompletedProcess[str]:
    """A command that has imported nothing heavy by its end."""
    done = subprocess.run([sys.executable, "-c", SPY, *map(str, arguments)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stderr
    return done


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"]])
def test_it_starts_without_torch(arguments):
    assert "fedh2l" in started(*arguments).stdout


def test_an_audit_needs_no_torch(tmp_path):
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric import ec

    from fedh2l.peer.audit import AuditLog

    log = AuditLog(tmp_path / "audit.jsonl", "north", "zoo", ec.generate_private_key(ec.SECP256R1()))
    log.record("posteriors", "south", 1, bytes(100))
    log.close()
    done = started("audit", tmp_path / "audit.jsonl")
    assert "'north' in 'zoo': 2 lines up to round 1, nothing else" in " ".join(done.stdout.split())


def test_a_status_needs_no_torch():
    grpc = pytest.importorskip("grpc")
    from fedh2l.peer.monitoring.status import LOCAL
    from fedh2l.peer.transport import fedh2l_pb2 as pb

    def answer(question, context):
        return pb.State(node="north", federation="zoo", phase="training", peers=[pb.Neighbour(name="south")])

    method = grpc.unary_unary_rpc_method_handler(answer, pb.Question.FromString, pb.State.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(LOCAL, {"Status": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = started("status", f"127.0.0.1:{port}")
    finally:
        server.stop(None)
    assert "'north' in 'zoo'" in done.stderr
    assert "south" in done.stderr


@pytest.mark.slow
def test_help_takes_little_longer_than_what_it_stands_on():
    """Whatever else the machine does slows both down, so they take turns."""
    commands = ["import typer, rich, pydantic", SPY]
    seconds: list[list[float]] = [[], []]
    for _ in range(9):
        for place, command in enumerate(commands):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", command, "--help"], capture_output=True, check=True)
            seconds[place].append(time.perf_counter() - began)
    assert statistics.median(seconds[1]) < MOST * statistics.median(seconds[0])


@pytest.mark.parametrize("known", [METHODS, DATASETS, MODELS], ids=["methods", "datasets", "models"])
def test_summaries_are_the_first_lines_of_docstrings(known):
    found = {name: (inspect.getdoc(thing) or "").splitlines()[0] for name, thing in known.items()}
    assert known.summaries() == found


@pytest.mark.parametrize("known", [METHODS, DATASETS])
def test_names_are_those_of_the_classes(known):
    assert all(thing.name == name for name, thing in known.items())
    assert "nothing" not in known
    assert known.get("nothing") is None


def test_presets_are_of_known_datasets():
    assert set(ARCHITECTURES) <= set(DATASETS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_summary_is_its_help(name):
    assert load_command(name).help == COMMANDS[name].summary


def test_the_help_shows_all_commands_in_order():
    assert list(typer.main.get_group(app).commands) == list(COMMANDS)


def test_names_of_the_package_are_imported_when_they_are_used():
    program = (
        "import sys, fedh2l\n"
        "assert set(fedh2l.__all__) <= set(dir(fedh2l)) and 'torch' not in sys.modules\n"
        "assert isinstance(fedh2l.__version__, str) and 'torch' not in sys.modules\n"
        "from fedh2l import Domain, Node, train\n"
        "assert 'torch' in sys.modules and Node is fedh2l.Node and vars(fedh2l)['train'] is train\n"
        "from fedh2l import *\n"
        "assert {'Optimizer', 'Shares', 'load'} <= set(globals())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_name_of_the_package_is_there():
    from fedh2l.training.optimizers import OptimizerSettings

    assert all(getattr(fedh2l, name) is not None for name in fedh2l.__all__)
    assert set(fedh2l._PLACES) == set(fedh2l.__all__)
    assert fedh2l.Optimizer is OptimizerSettings
    with pytest.raises(AttributeError, match="module 'fedh2l' has no attribute 'nothing'"):
        _ = fedh2l.nothing
