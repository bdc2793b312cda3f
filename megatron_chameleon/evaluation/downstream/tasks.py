"""lm-eval's tasks as they are defined there, from the hub or from local copies of their data."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from megatron_chameleon.errors import UserError

# In the order in which they are taken.
METRICS = ("acc_norm", "acc", "exact_match")
# Where lm-eval defines the paper's tasks; to read all of its definitions takes some eight seconds.
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
NOTES = MappingProxyType(
    {
        "race": "from version 3 (May 2026) on, its definition fills in the blanks of an article's "
        "earlier questions; the paper asked with the blanks",
    }
)
OWN_DOCUMENT_MAY_BE_IN = "where a question may stand among its own examples"
SCRIPT_REFUSED = "Dataset scripts are no longer supported"


class CannotAskError(Exception):
    """Why a task cannot be asked, in one line; the others go on."""


@dataclasses.dataclass(frozen=True)
class LoadedTask:
    """A task with its data.

    Attributes:
        task: lm-eval's.
        name: what it is called.
        metric: the figure that counts.
        version: of its definition.
        shots_from: the split that shots are drawn from.
        without_shots: whether its definition forbids them.
    """

    task: Any
    name: str
    metric: str
    version: str
    shots_from: str
    without_shots: bool

    def set_shots(self, shots: int, seed: int) -> None:
        """Let so many solved examples stand before each question, drawn anew by ``seed``.

        Raises:
            CannotAskError: if the definition does not allow it.
        """
        if shots and self.without_shots:
            raise CannotAskError("its definition fixes the number of shots at 0")
        self.task.set_config(key="num_fewshot", value=shots)
        self.task.set_fewshot_seed(seed=seed)


class TaskLibrary:
    """The definitions of ``names``, and where their data are.

    Args:
        names: of single tasks.
        data_dir: holds OWNER/NAME for each data set; None for the hub.

    Raises:
        UserError: if lm-eval has no task of a name.
    """

    def __init__(self, names: Sequence[str], data_dir: Path | None) -> None:
        self.data_dir = data_dir
        self.manager = _manager(names)
        for name in names:
            if name not in self.manager.all_subtasks:
                raise UserError(f"--tasks {name}: {self._unknown(name)}")
        if data_dir is not None:
            if not data_dir.is_dir():
                raise UserError(f"--data-dir {data_dir} is no folder; it is to hold OWNER/NAME")
            # Deleted with the library: tasks read from it as long as they are asked.
            self._scratch = tempfile.TemporaryDirectory()
            self.manager = _with_local_data(self.manager, names, data_dir, Path(self._scratch.name))

    def load(self, name: str) -> LoadedTask:
        """The task with its data.

        Raises:
            CannotAskError: if the data cannot be had, or the task gives no accuracy.
        """
        self._check_local_copy(name)
        try:
            task = self.manager.load(name)["tasks"][name]
        except Exception as error:  # of the hub, of files, or of the definition: of any kind
            raise CannotAskError(_why_not_loaded(error)) from error
        metric = next((each for each in METRICS if each in task.aggregation()), None)
        if metric is None:
            raise CannotAskError(f"it gives none of {', '.join(METRICS)}")
        return LoadedTask(
            task=task,
            name=name,
            metric=metric,
            version=str(task.VERSION),
            shots_from=keep_own_document_out(task),
            without_shots=task.get_config("num_fewshot") == 0,
        )

    def _check_local_copy(self, name: str) -> None:
        data_set = _definition(self.manager, name).get("dataset_path")
        if self.data_dir is not None and data_set is not None and not Path(data_set).is_dir():
            raise CannotAskError(f"there is no {data_set}: put its data set there")

    def _unknown(self, name: str) -> str:
        if name in self.manager.all_tasks:
            return "that is a group of tasks; name the tasks in it"
        close = difflib.get_close_matches(name, self.manager.all_subtasks, n=3)
        hint = f"; is it {' or '.join(close)}?" if close else ""
        return f"lm-eval has no such task{hint or '; lm_eval ls tasks shows those it has'}"


def keep_own_document_out(task: ConfigurableTask) -> str:
    """Let no document be an example before its own question; the split that examples are from.

    lm-eval takes care of that where examples come from the split that its definition names for
    them. Where there is but one split, it names none.
    """
    few_shot = task.fewshot_cfg
    if few_shot.split is not None:
        asked_too = (
            task.config.test_split is None and few_shot.split == task.config.validation_split
        )
        return str(few_shot.split) + (f", {OWN_DOCUMENT_MAY_BE_IN}" if asked_too else "")
    if few_shot.samples is not None:
        return "its definition"
    if task.has_training_docs():
        return str(task.config.training_split)
    if task.has_validation_docs():
        return str(task.config.validation_split)
    few_shot.split = task.config.test_split
    return f"{task.config.test_split}, the question's own document left out"


def _manager(names: Sequence[str]) -> TaskManager:
    """One that knows ``names``; all of lm-eval's tasks where it has to."""
    root = Path(lm_eval_tasks.__file__).parent
    folders = sorted({root / FOLDERS[name] for name in names if name in FOLDERS})
    few = TaskManager(include_defaults=False, include_path=folders)
    return few if set(names) <= set(few.all_subtasks) else _all_definitions()


@functools.cache
def _all_definitions() -> TaskManager:
    return TaskManager()


def _with_local_data(
    manager: TaskManager, names: Sequence[str], data_dir: Path, scratch: Path
) -> TaskManager:
    """One in which the tasks are the same, but for where their data are.

    What is made of the data goes to ``scratch``: among what datasets caches, copies go by their
    names alone, and the content of another copy might be taken.
    """
    for name in names:
        definition = _definition(manager, name)
        kwargs = definition.get("dataset_kwargs") or {}
        changed: dict[str, Any] = {"include": str(manager.task_index[name].yaml_path)}
        if definition.get("dataset_path") is not None:
            changed["dataset_path"] = str(data_dir.absolute() / definition["dataset_path"])
            changed["dataset_kwargs"] = {**kwargs, "cache_dir": str(scratch / "cache")}
        # JSON is YAML too.
        (scratch / f"{name}.yaml").write_text(json.dumps(changed), encoding="utf-8")
    return TaskManager(include_defaults=False, include_path=scratch)


def _definition(manager: TaskManager, name: str) -> dict[str, Any]:
    """What lm-eval's file says of a task, without the functions that it names."""
    return manager.task_index[name].cfg or {}


def _why_not_loaded(error: Exception) -> str:
    if SCRIPT_REFUSED in str(error):
        return (
            f"{error}: its repository on the hub is a program; put its data as files into a "
            "folder and give that by --data-dir (docs/downstream.md says how)"
        )
    return in_one_line(error)


def in_one_line(error: Exception) -> str:
    """What an error says, with its kind where it is not ours."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())
