"""Write docs/reference/config.md and docs/reference/commands.md from the code.

python docs/make_reference.py            # write both pages
python docs/make_reference.py --check    # exit with 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedh2l.cli.app import COMMANDS as COMMAND_TABLE
from fedh2l.cli.app import _options
from fedh2l.data.base import Dataset
from fedh2l.data.datasets.image_folder import ImageFolder
from fedh2l.data.registry import DATASETS
from fedh2l.experiment.config import NodeSettings
from fedh2l.experiment.settings import RaySettings, RunSettings
from fedh2l.experiment.toml import toml_value
from fedh2l.methods.registry import METHODS
from fedh2l.peer.membership.augmentation import SharedViews
from fedh2l.peer.membership.roster_sections import Agreement, Member, Timing
from fedh2l.peer.own_data import OwnImages, OwnTable
from fedh2l.peer.settings import LOCAL, PeerSettings
from fedh2l.training.optimizers import OptimizerSettings

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Made by docs/make_reference.py. Change the descriptions in the code, then run it again. -->"

CONFIG = f"""{NOTE}

# Configuration

`fedh2l run FILE` reads a TOML file with the sections below. Every key has a default unless the table says *required*.

    fedh2l init fedh2l.toml                            # a file with every key explained
    fedh2l check fedh2l.toml                           # check the file, its data and its models
    fedh2l run fedh2l.toml --set optimizer.lr=0.01     # change one key for this run

A value comes from the first of these places that has one:

1. an option of the command line, such as `--rounds`
2. `--set section.key=value`
3. the file
4. `method.preset`
5. the recommendation of the method ([table](#recommended-settings))
6. the default

An unknown key is an error. The message names the nearest valid key. A run saves its complete configuration as `config.toml` in its directory.
"""  # noqa: E501

PEER = """
## peer.toml

`fedh2l peer peer.toml` reads the configuration of a peer. It has the sections `[peer]`, `[data]`, `[run]` and `[optimizer]`. Paths in `[peer]` are relative to the file. [Deployment](../deploy.md) explains how to write it.
"""  # noqa: E501

ROSTER = """
## roster.toml

`fedh2l roster init` writes the roster. All members hold the same one. `[method]` has the keys of a [method](#method) whose messages are posteriors. `[[shares]]` holds one revealed share of the seed per member. These keys stand at the top of the file, before any section:

"""  # noqa: E501

COMMANDS = f"""{NOTE}

# Commands

`fedh2l COMMAND --help` prints the same information. Results go to standard output, everything else to standard error.
"""

EXIT_CODES = """
## Exit codes

| code | meaning |
| --- | --- |
| 0 | Success. Also `peer` after SIGTERM or Ctrl-C: it has saved its state. |
| 1 | Failure: training diverged, a run of a bench failed, `audit` found a problem, or the program has a bug. |
| 2 | Error in the input: an option, a configuration, data, a model or a file. Also `rehearse` after Ctrl-C. |
| 75 | `bench` reached its time limit. The same command continues it. |
| 130 | `run` or `bench` was interrupted, and saved its state. A second Ctrl-C stops at once, without saving. |

An error is one message on standard error, without a traceback. `--debug` adds the traceback.
"""


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([row(*head), row(*["---"] * len(head)), *(row(*cells) for cells in rows)]) + "\n"


# Configuration


def allowed(schema: dict[str, Any]) -> str:
    """The type and bounds of a value, in words, from its JSON schema."""
    if "anyOf" in schema:
        kinds = [allowed(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type")
    if kind == "array":
        return f"list of {plural(allowed(schema['items']))}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"table of {plural(allowed(values))}" if isinstance(values, dict) else "table"
    return {"boolean": "`true`, `false`", "string": "string"}.get(str(kind)) or f"{kind}{bounds(schema)}"


def plural(kind: str) -> str:
    head, _, rest = kind.partition(" ")
    return f"{head}s {rest}".rstrip()


def bounds(schema: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {number(schema[key])}" for key, sign in signs.items() if key in schema]
    return f" {', '.join(found)}" if found else ""


def number(value: float) -> str:
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value >= 2**31 else f"{value:g}"


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    explained = field.default is None or "By default" in (field.description or "")
    return "" if explained else f"`{toml_value(field.default)}`"


def keys(section: type[BaseModel], only: Iterable[str] | None = None) -> str:
    """The table of a section's keys, or of some of them."""
    schemas, fields = section.model_json_schema()["properties"], section.model_fields
    wanted = [key for key in fields if only is None or key in set(only)]
    rows = [(f"`{key}`", allowed(schemas[key]), default(fields[key]), fields[key].description or "") for key in wanted]
    return table(("key", "value", "default", "description"), rows)


def own_keys(section: type[BaseModel], base: type[BaseModel]) -> list[str]:
    """Keys that a section adds to those of its base class, or changes."""
    own, inherited = section.model_json_schema()["properties"], base.model_json_schema()["properties"]
    return [key for key in section.model_fields if {**own[key], "title": ""} != {**inherited.get(key, {}), "title": ""}]


def summary(thing: object) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]


def data_sections() -> Iterable[str]:
    yield "\n## [data]\n\n`data.name` chooses the dataset. These keys exist for all datasets:\n\n"
    names = ", ".join(f"`{name}`" for name in DATASETS) + ", or `package.module:function`"
    about = "Dataset, or a function that returns domains. The function gets the other keys."
    yield table(("key", "value", "default", "description"), [("`name`", names, '`"rotated-mnist"`', about)])
    yield keys(Dataset).split("\n", 2)[2]
    for name, dataset in DATASETS.items():
        inherits = issubclass(dataset, ImageFolder) and dataset is not ImageFolder
        more = " It has the keys of [image-folder](#image-folder), with these changes:" if inherits else ""
        changed = own_keys(dataset, ImageFolder if inherits else Dataset)
        yield f"\n### {name}\n\n{summary(dataset)}{more}\n\n{keys(dataset, changed)}"


def method_sections() -> Iterable[str]:
    yield "\n## [method]\n\n`method.name` chooses the method, as `--method` does.\n\n"
    names = ", ".join(f"`{name}`" for name in METHODS) + ", or `package.module:Class`"
    rows = [
        ("`name`", names, '`"fedh2l"`', "Method."),
        ("`preset`", "string", "", "Named set of values ([table](#presets))."),
    ]
    yield table(("key", "value", "default", "description"), rows)
    for name, method in METHODS.items():
        base = method.__mro__[1]
        inherits = base in METHODS.values()
        more = f" It has the keys of [{base.name}](#{base.name}), with these changes:" if inherits else ""
        changed = own_keys(method, base) if inherits else list(method.model_fields)
        yield f"\n### {name}\n\n{summary(method)}{more}\n\n{keys(method, changed)}"
    yield recommended()
    yield presets()


def recommended() -> str:
    text = (
        "\n### Recommended settings\n\nA method can recommend values for other sections. "
        "They replace the defaults, if the dataset has the key.\n\n"
    )
    rows = []
    for name, method in METHODS.items():
        for labelled in (True, False):
            values = "<br>".join(f"`{key} = {toml_value(value)}`" for key, value in method.recommends(labelled).items())
            if values:
                rows.append((f"`{name}`", "with labels" if labelled else "without labels", values))
    return text + table(("method", "public data", "values"), rows)


def presets() -> str:
    text = (
        "\n### Presets\n\n`method.preset` fills in the values of a method's own paper or code, "
        "where they differ from the defaults.\n\n"
    )
    rows = [
        (f"`{name}`", f"`{preset}`", "<br>".join(f"`{key} = {toml_value(value)}`" for key, value in values.items()))
        for name, method in METHODS.items()
        for preset, values in method.presets.items()
    ]
    return text + table(("method", "preset", "values"), rows)


def config_page() -> str:
    nodes = "One `[[nodes]]` table per node. Without any, there is one node for each domain of the dataset.\n\n"
    ray = "Used if `run.engine` is `ray` ([on a cluster](../cluster.md)).\n\n"
    listed = ", ".join(f"`{key}`" for key in LOCAL)
    parts = [
        CONFIG,
        f"\n## [run]\n\n{keys(RunSettings)}",
        *data_sections(),
        *method_sections(),
        f"\n## [optimizer]\n\n{keys(OptimizerSettings)}",
        f"\n## [[nodes]]\n\n{nodes}{keys(NodeSettings)}",
        f"\n## [ray]\n\n{ray}{keys(RaySettings)}",
        PEER,
        f"\n### [peer]\n\n{keys(PeerSettings)}",
        "\n### [data] of a peer\n\nA peer reads one file or one folder, or calls a function as in a run. "
        'With `name = "table"` it has these keys:\n\n',
        keys(OwnTable),
        '\nWith `name = "image-folder"`:\n\n',
        keys(OwnImages),
        f"\n### [run] and [optimizer] of a peer\n\n`[run]` may have {listed}. The roster sets the other keys. "
        "`kernels` is `off` by default, so that nothing is compiled on the machine of a peer. "
        "`[optimizer]` has the keys of [a run](#optimizer).\n",
        ROSTER,
        keys(Agreement),
        f"\n### [timing]\n\n{keys(Timing)}",
        f"\n### [views]\n\nAugmentation of public images, the same for all members.\n\n{keys(SharedViews)}",
        f"\n### [[members]]\n\n{keys(Member)}",
    ]
    return "".join(parts)


# Commands


def parameters(function: Callable[..., Any]) -> list[tuple[inspect.Parameter, typer.models.ParameterInfo]]:
    """The arguments and options of a command, with what typer knows of each."""
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = get_args(hints[name])
        infos = [each for each in kind if isinstance(each, typer.models.ParameterInfo)]
        found += [(parameter.replace(annotation=kind[0]), info) for info in infos]
    return found


def label(parameter: inspect.Parameter, info: typer.models.ParameterInfo) -> str:
    """An argument as `FILE`, an option as `--out DIR`."""
    if isinstance(info, typer.models.ArgumentInfo):
        return f"`{info.metavar or parameter.name.upper()}`"
    named = (info.default, *(info.param_decls or ()))  # typer keeps the first name there
    options = [text for text in named if isinstance(text, str) and text.startswith("-")]
    option = options[0] if options else "--" + parameter.name.replace("_", "-")
    if isinstance(parameter.default, bool):
        return f"`{option}`"
    return f"`{option} {info.metavar or placeholder(parameter)}`"


def placeholder(parameter: inspect.Parameter) -> str:
    kind = str(parameter.annotation)
    names = {
        "LogFormat": "text|json",
        "int": "N",
        "float": "SECONDS",
        "Path": "DIR" if "folder" in parameter.name else "FILE",
    }
    return next((name for part, name in names.items() if part in kind), parameter.name.upper())


def shown_default(parameter: inspect.Parameter, info: typer.models.ParameterInfo) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "*required*"
    if parameter.default is None or isinstance(parameter.default, bool):
        return ""
    return f"`{parameter.default}`"


def command(name: str, function: Callable[..., Any]) -> str:
    known = parameters(function)
    arguments = [label(*each).strip("`") for each in known if isinstance(each[1], typer.models.ArgumentInfo)]
    usage = " ".join(["fedh2l", name, *arguments, *["[OPTIONS]"] * (len(arguments) < len(known))])
    text = f"\n## fedh2l {name}\n\n    {usage}\n\n{summary(function)}\n"
    rows = [(label(*each), shown_default(*each), each[1].help or "") for each in known]
    return text + (f"\n{table(('argument or option', 'default', 'description'), rows)}" if rows else "")


def commands_of() -> Iterable[tuple[str, Callable[..., Any]]]:
    """All commands, in the order of the help. Those of a group have its name before theirs."""
    for name, about in COMMAND_TABLE.items():
        found = getattr(import_module(f"fedh2l.cli.{about.module}"), about.name)
        if not isinstance(found, typer.Typer):
            yield name, found
            continue
        for registered in found.registered_commands:
            assert registered.callback is not None
            yield f"{name} {registered.name or registered.callback.__name__}", registered.callback


def commands_page() -> str:
    known = list(commands_of())
    every = [(f"[`{name}`](#fedh2l-{name.replace(' ', '-')})", summary(function)) for name, function in known]
    options = [(label(*each), each[1].help or "") for each in parameters(_options)]
    parts = [
        COMMANDS,
        "\n" + table(("command", "task"), every),
        "\nOptions of all commands:\n\n" + table(("option", "description"), options),
        EXIT_CODES,
        *(command(*each) for each in known),
    ]
    return "".join(parts)


PAGES = {"config.md": config_page, "commands.md": commands_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing. Exit with 1 if a page is out of date.")
    given = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not given.check:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'out of date' if given.check else 'wrote'}: {', '.join(stale)}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
