"""lm-eval's task definitions, with data sets from the hub or from local copies."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
from huggingface_hub import constants, get_session, hf_hub_url
from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.errors import UserError

# In order of preference.
METRICS = ("acc_norm", "acc", "exact_match")
# Where lm-eval defines the paper's tasks; reading all of its definitions takes about 8 seconds.
FOLDERS = MappingProxyType(
    {
        "arc_easy": "arc",
        "copa": "super_glue/copa",
        "hellaswag": "hellaswag",
        "lambada_openai": "lambada",
        "logiqa": "logiqa",
        "multirc": "super_glue/multirc",
        "openbookqa": "openbookqa",
        "piqa": "piqa",
        "qqp": "glue/qqp",
        "race": "race",
        "sciq": "sciq",
        "social_iqa": "siqa",
        "winogrande": "winogrande",
    }
)
COPIES = "pass copies of data sets by --data-dir (see docs/downstream.md)"
HUB_ATTEMPTS = 2


class TaskUnavailableError(Exception):
    """A task cannot be evaluated (one-line reason); the other tasks still are."""


@dataclasses.dataclass(frozen=True)
class LoadedTask:
    """A task with its data.

    Attributes:
        task: lm-eval's.
        name: lm-eval's.
        metric: the metric that is reported.
        version: of its definition.
        shots_from: the split that few-shot examples are sampled from.
        without_shots: whether its definition fixes the number of shots at 0.
    """

    task: Any
    name: str
    metric: str
    version: str
    shots_from: str
    without_shots: bool

    def set_shots(self, shots: int, seed: int) -> None:
        """Set the number of few-shot examples per question, sampled by ``seed``.

        Raises:
            TaskUnavailableError: if the definition does not allow it.
        """
        if shots and self.without_shots:
            raise TaskUnavailableError("its definition fixes the number of shots at 0")
        self.task.set_config(key="num_fewshot", value=shots)
        self.task.set_fewshot_seed(seed=seed)


class TaskLibrary:
    """The definitions of ``names``, and the location of their data.

    Args:
        names: of single tasks.
        data_dir: holds the data sets as OWNER/NAME; None for the hub.

    Raises:
        UserError: if lm-eval has no task of a name, or there is no ``data_dir``.
    """

    def __init__(self, names: Sequence[str], data_dir: Path | None) -> None:
        self.data_dir = data_dir
        self.hub_problem = ""
        root = Path(lm_eval_tasks.__file__).parent
        folders = sorted({root / FOLDERS[name] for name in names if name in FOLDERS})
        self.manager = TaskManager(include_defaults=False, include_path=folders)
        if not set(names) <= set(self.manager.all_subtasks):
            self.manager = _all_definitions()
        for name in names:
            if name not in self.manager.all_subtasks:
                raise UserError(f"--tasks {name}: {self._unknown(name)}")
        if data_dir is not None:
            if not data_dir.is_dir():
                raise UserError(f"--data-dir {data_dir} is not a folder; it must hold OWNER/NAME")
            # Deleted with the library: tasks read from it until they are evaluated.
            self._scratch = tempfile.TemporaryDirectory()
            self.manager = self._with_local_data(names, data_dir, Path(self._scratch.name))

    def load(self, name: str) -> LoadedTask:
        """The task with its data.

        Raises:
            TaskUnavailableError: if the data cannot be loaded, or the task defines no accuracy.
        """
        copy = self._local_copy(name)
        if copy is not None:
            if not copy[0].is_dir():
                raise TaskUnavailableError(f"{copy[0]} does not exist; copy its data set there")
            empty = next((path for path in data_files(*copy) if path.stat().st_size == 0), None)
            if empty is not None:
                raise TaskUnavailableError(f"{empty} is empty")
        path = str(self._definition(name).get("dataset_path"))
        on_hub = self.data_dir is None and path.count("/") == 1 and not Path(path).is_dir()
        try:
            with self._probed_hub(path) if on_hub else contextlib.nullcontext():
                task = self.manager.load(name)["tasks"][name]
        except Exception as error:  # of the hub, of files or of the definition: any type
            reason = in_one_line(error)
            if "Dataset scripts are no longer supported" in str(error):
                reason = f"{error}: its repository on the hub is a script; {COPIES}"
            elif isinstance(error, OSError) and self.hub_problem:
                reason = f"{self.hub_problem}, and the data set is not cached; {COPIES}"
            elif isinstance(error, ConnectionError):
                reason = f"{reason}; {COPIES}"
            raise TaskUnavailableError(reason) from error
        metric = next((each for each in METRICS if each in task.aggregation()), None)
        if metric is None:
            raise TaskUnavailableError(f"it defines none of {', '.join(METRICS)}")
        return LoadedTask(
            task=task,
            name=name,
            metric=metric,
            version=str(task.VERSION),
            shots_from=exclude_own_document(task),
            without_shots=task.get_config("num_fewshot") == 0,
        )

    def data_of(self, name: str) -> str | None:
        """Identity of a task's data, see :class:`PartSettings`; None for a missing local copy."""
        copy = self._local_copy(name)
        if copy is None:
            return "hub"
        folder = copy[0]
        if not folder.is_dir():
            return None
        hashes = {p.relative_to(folder).as_posix(): sha256_of_files(p) for p in data_files(*copy)}
        return f"sha256:{sha256_of_json(hashes)}"

    def _definition(self, name: str) -> dict[str, Any]:
        """lm-eval's definition of a task, without the functions that it names."""
        return self.manager.task_index[name].cfg or {}

    def _local_copy(self, name: str) -> tuple[Path, str | None] | None:
        """Folder and configuration of its data; None if they are not in the folder of copies."""
        definition = self._definition(name)
        if self.data_dir is None or definition.get("dataset_path") is None:
            return None
        return Path(definition["dataset_path"]), definition.get("dataset_name")

    def _with_local_data(self, names: Sequence[str], data_dir: Path, scratch: Path) -> TaskManager:
        """The same tasks with their data sets in ``data_dir``.

        The data sets' cache goes to ``scratch``: the shared cache identifies copies by name only,
        and might return the content of another one.
        """
        for name in names:
            definition = self._definition(name)
            kwargs = definition.get("dataset_kwargs") or {}
            changed: dict[str, Any] = {"include": str(self.manager.task_index[name].yaml_path)}
            if definition.get("dataset_path") is not None:
                changed["dataset_path"] = str(data_dir.absolute() / definition["dataset_path"])
                changed["dataset_kwargs"] = {**kwargs, "cache_dir": str(scratch / "cache")}
            # JSON is YAML too.
            (scratch / f"{name}.yaml").write_text(json.dumps(changed), encoding="utf-8")
        return TaskManager(include_defaults=False, include_path=scratch)

    @contextlib.contextmanager
    def _probed_hub(self, data_set: str) -> Iterator[None]:
        """Load ``data_set`` from the hub or its cache; offline once the hub did not answer.

        The package datasets would retry for minutes, and again for each data set.
        """
        if not self.hub_problem and not constants.HF_HUB_OFFLINE:
            self.hub_problem = _hub_problem(data_set)
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        if self.hub_problem:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before

    def _unknown(self, name: str) -> str:
        if name in self.manager.all_tasks:
            return "this is a group of tasks; name the tasks in it"
        close = difflib.get_close_matches(name, self.manager.all_subtasks, n=3)
        hint = f"is it {' or '.join(close)}?" if close else "lm_eval ls tasks lists them"
        return f"lm-eval has no such task; {hint}"


@functools.cache
def _all_definitions() -> TaskManager:
    return TaskManager()


def _hub_problem(data_set: str) -> str:
    """Why the hub does not answer a request for ``data_set``; empty if it does."""
    address = hf_hub_url(data_set, "README.md", repo_type="dataset")
    problem = ""
    for _ in range(HUB_ATTEMPTS):
        try:
            get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # the type depends on the HTTP library
            problem = f"{type(error).__name__}: {error}"
        else:
            return ""  # datasets interprets the answer
    return f"{constants.ENDPOINT} does not answer ({problem})"


def data_files(folder: Path, configuration: str | None) -> list[Path]:
    """The files of a local copy of a data set, hidden ones excluded.

    Those in the configuration's own folder if there is one, else all: other configurations may be
    added at any time.
    """
    own = folder / (configuration or "")
    root = own if own.is_dir() else folder
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    # Downloads keep their state in hidden files.
    return sorted(root / p for p in found if not any(part.startswith(".") for part in p.parts))


def exclude_own_document(task: ConfigurableTask) -> str:
    """Exclude a question's own document from its few-shot examples; return the examples' split.

    lm-eval excludes it if the definition names the same split for examples and for tests. Splits
    that the definition leaves out may be the same one all the same.
    """
    few_shot, splits = task.fewshot_cfg, task.config
    if few_shot.split is None and few_shot.samples is not None:
        return "its definition"
    source = few_shot.split or splits.training_split or splits.validation_split or splits.test_split
    if source != (splits.test_split or splits.validation_split):
        return str(source)
    few_shot.split = splits.test_split
    return f"{source}, the question's own document left out"


def in_one_line(error: Exception) -> str:
    """An error's message, with its type unless it is a UserError, and with its causes."""
    if isinstance(error, UserError):
        return str(error)
    cause = f" ({in_one_line(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{cause}"
