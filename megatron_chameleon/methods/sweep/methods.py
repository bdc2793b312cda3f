"""The methods of a sweep: hyperparameters, files and computation of one point."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Corpus, EmbeddingStore, KnobValue
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.methods.chameleon.compute import compute_mixture, embedding_recipe
from megatron_chameleon.methods.chameleon.options import ChameleonOptions
from megatron_chameleon.methods.doge.compute import MU, compute_doge, plan_doge
from megatron_chameleon.methods.doge.compute import recipe_of as doge_recipe
from megatron_chameleon.methods.doge.options import DogeOptions, DogeRule
from megatron_chameleon.methods.domains import require_training_tokens
from megatron_chameleon.methods.doremi.compute import compute_doremi, plan_doremi
from megatron_chameleon.methods.doremi.compute import recipe_of as doremi_recipe
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.proxy import PROXY, forward_only, train_proxy, training_options
from megatron_chameleon.methods.sweep.options import MethodName, SweepOptions
from megatron_chameleon.mixture.doge import DogeRecipe
from megatron_chameleon.mixture.doremi import DoremiRecipe
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.stopping import StopRequests

Values = dict[str, KnobValue]
"""Hyperparameter -> value. It has the name of the option that sets its value at the centre."""

# Folders of a sweep. The mixtures have a subfolder, since the report offers those in 4-mixture for
# training.
PROXIES, STORES, MIXTURES = "2-proxy", "3-embeddings", "4-mixture/sweep"
RULE_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class PointFiles:
    """Artifacts of a point: the mixture, and the folders that it was computed from."""

    mixture: Path
    made_from: tuple[Path, ...]


class SweptMethod(abc.ABC):
    """A method whose hyperparameters can be swept."""

    def centre(self, options: SweepOptions) -> Values:
        """The hyperparameters of the method, with the values that ``options`` set."""
        return {"model_size": options.proxy.model_size, "train_iters": options.proxy.train_iters}

    @abc.abstractmethod
    def files(self, options: SweepOptions, values: Values) -> PointFiles:
        """The artifacts of a point; points share those that do not differ."""

    @abc.abstractmethod
    def check(self, options: SweepOptions, values: Values) -> None:
        """Raise UserError for an error that would end the computation of the point."""

    @abc.abstractmethod
    def compute(self, options: SweepOptions, values: Values, stops: StopRequests) -> bool:
        """Write the mixture of a point; False after a stop signal. Called on every rank."""


def proxy_options(options: SweepOptions, values: Values) -> ProxyOptions:
    """Training options of a point's proxy."""
    return dataclasses.replace(
        options.proxy,
        model_size=str(values["model_size"]),
        train_iters=int(values["train_iters"]),
    )


def plain_proxy_dir(options: SweepOptions, values: Values) -> Path:
    """Run folder of a point's proxy without a hook: Chameleon's proxy, and DoReMi's reference.

    Both are trained on uniform mixtures, so that sweeps of both methods in one folder share it.
    """
    return options.output / PROXIES / _proxy_name(options, values)


def _proxy_name(options: SweepOptions, values: Values) -> str:
    return f"{values['model_size']}-{values['train_iters']}steps-seed{options.proxy.seed}"


class ChameleonSweep(SweptMethod):
    """Chameleon: a proxy, its embeddings, and the weights computed from them."""

    def centre(self, options: SweepOptions) -> Values:
        """As of every method, the number of windows, and the ridge unless the recipe scales it."""
        values = {**super().centre(options), "num_windows": options.extraction.num_windows}
        recipe = options.weighting.resolve()
        return values if recipe.ridge_relative else {**values, "ridge": recipe.ridge}

    def files(self, options: SweepOptions, values: Values) -> PointFiles:
        """The proxy's run, the embedding store and the mixture."""
        store = f"{_proxy_name(options, values)}-{values['num_windows']}windows"
        ridge = f"-ridge{values['ridge']:g}" if "ridge" in values else ""
        return PointFiles(
            mixture=options.output / MIXTURES / f"chameleon-{options.mode}-{store}{ridge}.json",
            made_from=(plain_proxy_dir(options, values), options.output / STORES / store),
        )

    def training_options(self, options: SweepOptions, values: Values) -> PretrainOptions:
        """Options of the proxy's run."""
        run_dir = plain_proxy_dir(options, values)
        return training_options(proxy_options(options, values), options.corpus, run_dir)

    def method_options(self, options: SweepOptions, values: Values) -> ChameleonOptions:
        """Options of the method at a point."""
        files = self.files(options, values)
        run_dir, store = files.made_from
        extraction, weighting = options.extraction, options.weighting
        if "ridge" in values:
            weighting = dataclasses.replace(weighting, ridge=float(values["ridge"]))
        return ChameleonOptions(
            corpus=options.corpus,
            checkpoint=run_dir,
            output=files.mixture,
            mode=options.mode,
            store=store,
            extraction=dataclasses.replace(extraction, num_windows=int(values["num_windows"])),
            weighting=weighting,
            parallel=forward_only(options.proxy.parallel),
        )

    def check(self, options: SweepOptions, values: Values) -> None:
        """Check training, embedding and weighting."""
        run = self.training_options(options, values)
        proxy = plan_training(run)
        check_run_folder(proxy)
        method = self.method_options(options, values)
        method.weighting.resolve()
        corpus = Corpus.load(options.corpus)
        recipe = embedding_recipe(method.extraction, proxy.shape, "", corpus.tokenizer.sha256)
        check_model_layout(proxy.shape.size, method.parallel, recipe.window_length)
        assert method.store is not None
        if EmbeddingStore.exists(method.store):
            stored = EmbeddingStore.load(method.store)
            # The hash of the proxy is known once it is trained.
            recipe = dataclasses.replace(recipe, model_hash=stored.recipe.model_hash)
            stored.require_recipe(recipe)
        require_training_tokens(corpus, corpus.names, "to embed")

    def compute(self, options: SweepOptions, values: Values, stops: StopRequests) -> bool:
        """Train the proxy unless it is finished, embed missing domains, and write the mixture."""
        run = self.training_options(options, values)
        finished = train_proxy(run, stops, name="Chameleon's proxy")
        if finished:  # a signal ends the process while embedding; embedded domains are kept
            compute_mixture(self.method_options(options, values))
        return finished


def hooked_files(
    options: SweepOptions,
    values: Values,
    rule: DogeRecipe | DoremiRecipe,
    default: DogeRecipe | DoremiRecipe,
) -> PointFiles:
    """The mixture and the proxy of a method with a training hook.

    Their names contain a digest of the update rule unless it is the method's ``default``, so that
    sweeps of several rules can share a folder.
    """
    name = f"{options.method}-{_proxy_name(options, values)}"
    if rule != default:
        name = f"{name}-{sha256_of_json(dataclasses.asdict(rule))[:RULE_DIGITS]}"
    return PointFiles(
        mixture=options.output / MIXTURES / f"{name}.json",
        made_from=(options.output / PROXIES / name / PROXY,),
    )


def _hooked_options(options: SweepOptions, values: Values, files: PointFiles) -> dict[str, Any]:
    return {
        "corpus": options.corpus,
        "output": files.mixture,
        "work_dir": files.made_from[-1].parent,
        "proxy": proxy_options(options, values),
    }


class DogeSweep(SweptMethod):
    """DoGE with all domains as the target."""

    def files(self, options: SweepOptions, values: Values) -> PointFiles:
        """The proxy's run and the mixture."""
        rule, default = doge_recipe(options.doge, MU), doge_recipe(DogeRule(), MU)
        return hooked_files(options, values, rule, default)

    def method_options(self, options: SweepOptions, values: Values) -> DogeOptions:
        """Options of the method at a point."""
        shared = _hooked_options(options, values, self.files(options, values))
        return DogeOptions(rule=options.doge, **shared)

    def check(self, options: SweepOptions, values: Values) -> None:
        """Check as the method does before training."""
        plan_doge(self.method_options(options, values))

    def compute(self, options: SweepOptions, values: Values, stops: StopRequests) -> bool:
        """Train the proxy unless it is finished, and write the mixture."""
        return compute_doge(self.method_options(options, values), stops)


class DoremiSweep(SweptMethod):
    """DoReMi with a reference of the proxy's size and steps."""

    def files(self, options: SweepOptions, values: Values) -> PointFiles:
        """The runs of reference and proxy, and the mixture."""
        rule, default = doremi_recipe(options.doremi), doremi_recipe(DoremiRule())
        files = hooked_files(options, values, rule, default)
        reference = plain_proxy_dir(options, values)
        return dataclasses.replace(files, made_from=(reference, *files.made_from))

    def method_options(self, options: SweepOptions, values: Values) -> DoremiOptions:
        """Options of the method at a point, apart from the reference."""
        shared = _hooked_options(options, values, self.files(options, values))
        return DoremiOptions(rule=options.doremi, **shared)

    def reference_options(self, options: SweepOptions, values: Values) -> PretrainOptions:
        """Options of the reference's run."""
        run_dir = plain_proxy_dir(options, values)
        return training_options(proxy_options(options, values), options.corpus, run_dir)

    def check(self, options: SweepOptions, values: Values) -> None:
        """Check as the method does before training."""
        method, reference = (
            self.method_options(options, values),
            self.reference_options(options, values),
        )
        plan_doremi(method, reference)

    def compute(self, options: SweepOptions, values: Values, stops: StopRequests) -> bool:
        """Train the runs that are not finished, and write the mixture."""
        method = self.method_options(options, values)
        return compute_doremi(method, stops, self.reference_options(options, values))


METHODS: dict[MethodName, SweptMethod] = {
    "chameleon": ChameleonSweep(),
    "doge": DogeSweep(),
    "doremi": DoremiSweep(),
}
