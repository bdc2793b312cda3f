"""Measure the surrogate of losses over mixtures on the public results of RegMix and mixing laws.

    OMP_NUM_THREADS=1 python benchmarks/surrogate.py --validation FOLDER --random 4
    OMP_NUM_THREADS=1 python benchmarks/surrogate.py --swarm RUN/4-mixture/regmix/swarm
    OMP_NUM_THREADS=1 python benchmarks/surrogate.py --synthetic 20
    OMP_NUM_THREADS=1 python benchmarks/surrogate.py --noise 20

FOLDER holds RegMix's tables in regmix/ (``train_mixture_1m.csv``, ``train_pile_loss_1m.csv``,
``test_...``) and the table of five domains of Data Mixing Laws in mixing_laws/. The second command
measures the surrogate on a swarm that compute_mixture.py trained. Every line of both is the mean
over the held-out runs, which no fit has seen. The third command compares the predicted gain of the
optimum with its true gain, on tables of known losses with noise; the fourth does so on noise alone.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import norm

from megatron_chameleon.artifacts.swarm import METRICS_NAME, RATIOS_NAME
from megatron_chameleon.interchange.mixture_runs import read_mixture_runs
from megatron_chameleon.methods.surrogate.compute import HALVES_PER_SEARCH, predicted_gains
from megatron_chameleon.mixture import Surrogate, fit_surrogate
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict, quality_of
from megatron_chameleon.mixture.gain import PredictedGain
from megatron_chameleon.mixture.optimum import minimize_mixture
from megatron_chameleon.mixture.regmix import sample_mixtures
from megatron_chameleon.mixture.surrogate import OPTIMISM_OF_ALL_RUNS, optimism_of_halves

TARGETS = ("pile_cc", "arxiv", "github", "wikipedia_en", "stackexchange", "dm_mathematics")
FITTED_OF_FIVE_DOMAINS = 20
NUM_DRAWS, NUM_SPLITS = 10_000, 4
# Runs and losses of the synthetic tables, by number of domains, and the noise of a loss.
SYNTHETIC_SIZES = {7: (40, 7), 20: (80, 4)}
SYNTHETIC_NOISE = 0.02


def main() -> None:
    """Print the errors of the surrogate, and of the models behind it, on held-out runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--validation", type=Path, help="folder of public results")
    parser.add_argument("--swarm", type=Path, nargs="*", default=[], help="folders of swarm.json")
    parser.add_argument("--runs", type=int, nargs="*", default=[64, 512], help="runs of RegMix")
    parser.add_argument("--random", type=int, default=0, help="random subsets of 64 runs of RegMix")
    parser.add_argument("--gains", type=int, default=0, help="subsets whose gains are predicted")
    parser.add_argument(
        "--splits", type=int, default=16, help="random splits of the five domains and of swarms"
    )
    parser.add_argument("--synthetic", type=int, default=0, help="tables of known losses")
    parser.add_argument("--noise", type=int, default=0, help="tables of noise alone")
    parser.add_argument(
        "--domains", type=int, nargs="*", default=[7, 20], help="domains of these tables"
    )
    arguments = parser.parse_args()
    for num_domains in arguments.domains:
        for num_tables, has_signal in ((arguments.synthetic, True), (arguments.noise, False)):
            if num_tables:
                synthetic(num_domains, num_tables, has_signal)
    for folder in arguments.swarm:
        swarm(folder, arguments.splits)
    if arguments.validation is not None:
        regmix(arguments.validation / "regmix", arguments.runs, arguments.random)
        regmix_gains(arguments.validation / "regmix", arguments.gains)
        five_domains(arguments.validation / "mixing_laws", arguments.splits)


def swarm(folder: Path, splits: int) -> None:
    """Print rank correlations and errors on a third of a swarm's members, over random splits."""
    runs = read_mixture_runs(folder / RATIOS_NAME, folder / METRICS_NAME)
    found: dict[str, list[tuple[float, ...]]] = {}
    covered = []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(runs.keys))
        fitted, held_out = np.split(order, [2 * len(order) // 3])
        surrogate = fit_surrogate(runs.mixtures[fitted], runs.losses[fitted])
        others, measured = runs.mixtures[held_out], runs.losses[held_out]
        predicted = predictions(surrogate, others)
        constant = np.broadcast_to(np.median(runs.losses[fitted], axis=0), measured.shape)
        for model, values in {**predicted, "constant": constant}.items():
            each = quality_of(values, measured)
            mean = quality_of(values.mean(axis=1)[:, None], measured.mean(axis=1)[:, None])
            found.setdefault(model, []).append(
                (each.spearman.mean(), each.mae.mean(), mean.spearman[0], mean.mae[0])
            )
        covered.append(coverage(surrogate, others, measured).mean())
    print(
        f"{folder}: {len(fitted)} of {len(order)} members, {splits} splits, {len(runs.metrics)} "
        f"losses; coverage {np.mean(covered):.3f} (sd {np.std(covered):.3f})"
    )
    errors = np.array([[row[1] for row in found[model]] for model in found])
    for model, rows, error in zip(found, found.values(), errors, strict=True):
        each, mae, mean, mean_mae = np.mean(rows, axis=0)
        best = (errors[list(found).index("stack")] < error).mean()
        print(
            f"  {model}: rank correlation {each:.3f}, error {mae:.4f}; mean of the losses: rank "
            f"correlation {mean:.3f}, error {mean_mae:.4f}; the stack errs less in {best:.0%}"
        )


def regmix(folder: Path, sizes: list[int], num_random: int) -> None:
    """Print rank correlations with the 256 test runs, and the coverage of 90% intervals."""
    rows, losses, others, measured = regmix_runs(folder)
    targets = [losses.columns.get_loc(f"metric/the_pile_{name}_val_loss") for name in TARGETS]
    subsets = {f"first {size}": np.arange(size) for size in sizes}
    for seed in range(num_random):
        order = np.random.default_rng(seed).permutation(len(rows))
        subsets[f"random 64, seed {seed}"] = order[:64]
    for name, subset in subsets.items():
        start = time.process_time()
        surrogate = fit_surrogate(rows[subset], losses.to_numpy()[subset])
        seconds = time.process_time() - start
        ranks = {
            model: quality_of(predicted[:, targets], measured[:, targets]).spearman.mean()
            for model, predicted in predictions(surrogate, others).items()
        }
        line = ", ".join(f"{model} {rank:.4f}" for model, rank in ranks.items())
        covered = coverage(surrogate, others, measured).mean()
        print(f"RegMix, {name}: rank correlation {line}; coverage {covered:.3f}; {seconds:.1f} s")


def regmix_runs(folder: Path) -> tuple[Array, pd.DataFrame, Array, Array]:
    """Return mixtures and losses of the training runs, and of the test runs."""

    def read(name: str) -> pd.DataFrame:
        return pd.read_csv(folder / f"{name}_1m.csv", index_col=0)

    rows, others = read("train_mixture").to_numpy(), read("test_mixture").to_numpy()
    return rows, read("train_pile_loss"), others, read("test_pile_loss").to_numpy()


def regmix_gains(folder: Path, num_sets: int) -> None:
    """Print the gains over Uniform that random sets of 64 runs predict, and that all runs predict.

    Each set has its own optimum, without limits; the mean of all training mixtures is the prior.
    """
    if not num_sets:
        return
    rows, losses, others, measured = regmix_runs(folder)
    num_domains, num_losses = rows.shape[1], losses.shape[1]
    reference = fit_surrogate(
        np.concatenate([rows, others]), np.concatenate([losses.to_numpy(), measured])
    )
    uniform = np.full(num_domains, 1.0 / num_domains)
    pile_cc = np.eye(num_losses)[losses.columns.get_loc("metric/the_pile_pile_cc_val_loss")]
    targets = {"Pile-CC": pile_cc, "mean of all": np.full(num_losses, 1.0 / num_losses)}
    for seed in range(num_sets):
        subset = np.random.default_rng(seed).permutation(len(rows))[:64]
        data = rows[subset], losses.to_numpy()[subset]
        for name, shares in targets.items():
            optimum, gains, _ = optimum_of(*data, shares, rows.mean(axis=0), {"uniform": uniform})
            by_all = np.diff(reference.mean(np.stack([optimum, uniform])) @ shares)[0]
            each = gains["uniform"]
            print(
                f"RegMix, random 64, seed {seed}, {name}: gain {each.gain:.3f} ({each.low:.3f} to "
                f"{each.high:.3f}); by all runs {by_all:.3f}",
                flush=True,
            )


def optimum_of(
    mixtures: Array, losses: Array, shares: Array, prior: Array, baselines: dict[str, Array]
) -> tuple[Array, dict[str, PredictedGain], Array]:
    """Return the optimum [k], its gains over the baselines, and the optimism [splits] of halves."""
    used = np.any(mixtures, axis=0).astype(np.float64)
    surrogate = fit_surrogate(mixtures, losses)

    def search(
        target: Predict, trained: Array, draws: int = NUM_DRAWS // HALVES_PER_SEARCH
    ) -> Array:
        low = np.zeros_like(used)
        return minimize_mixture(target, prior, low, used, trained=trained, num_draws=draws).weights

    optimum = search(lambda others: surrogate.mean(others) @ shares, mixtures, NUM_DRAWS)
    optimism = optimism_of_halves(mixtures, losses, shares, search, NUM_SPLITS)
    return optimum, predicted_gains(surrogate, optimum, baselines, shares, optimism, 0), optimism


def synthetic(num_domains: int, num_tables: int, has_signal: bool) -> None:
    """Print predicted and true gains of optima, on tables of known losses with noise.

    A loss is a power law c + a (t.w + 0.02)^-b of the weights w, where t is 1 for one domain, and
    the transfer from the others is from 0 to 0.2. The runs are sampled as RegMix's, and the target
    is the mean of all losses. Without a signal, all losses are constant.
    """
    num_runs, num_losses = SYNTHETIC_SIZES[num_domains]
    names, shares = ("uniform", "natural"), np.full(num_losses, 1 / num_losses)
    found = list[tuple[float, ...]]()
    start = time.process_time()
    for seed in range(num_tables):
        rng = np.random.default_rng([num_domains, seed])
        prior = np.maximum(rng.dirichlet(np.ones(num_domains)), 0.01)
        mixtures = sample_mixtures(prior, num_runs, seed)
        transfer = rng.uniform(0, 0.2, (num_losses, num_domains))
        transfer[:, :num_losses][np.eye(num_losses, dtype=bool)] = 1.0
        lowest, scale, exponent = (
            rng.uniform(*ends, num_losses) for ends in ((1.5, 2.5), (0.3, 0.8), (0.2, 0.5))
        )
        scale *= has_signal

        laws = scale, transfer, exponent
        noise = SYNTHETIC_NOISE * rng.normal(size=(num_runs, num_losses))
        losses = lowest + power_laws(mixtures, *laws) + noise
        points = [np.full(num_domains, 1 / num_domains), prior / prior.sum()]
        baselines = dict(zip(names, points, strict=True))
        optimum, gains, optimism = optimum_of(mixtures, losses, shares, prior, baselines)
        of_all = OPTIMISM_OF_ALL_RUNS * optimism.mean()
        after, *before = power_laws(np.stack([optimum, *points]), *laws) @ shares
        for name, value in zip(names, before, strict=True):
            each = gains[name]
            found.append((each.gain, each.low, each.high, value - after, each.gain + of_all))
            print(
                f"{num_domains} domains, {num_runs} runs, seed {seed}, {name}: gain "
                f"{each.gain:.4f} ({each.low:.4f} to {each.high:.4f}), without the correction "
                f"{each.gain + of_all:.4f}, true {value - after:.4f}",
                flush=True,
            )
    for at, name in enumerate(names):
        gain, low, high, true_gain, plain = np.array(found[at :: len(names)]).T
        error, count, certain = gain - true_gain, len(gain), low > 0
        covered = (low <= true_gain) & (true_gain <= high)
        print(
            f"{num_domains} domains, {num_runs} runs, {count} tables, over {name}: mean gain "
            f"{gain.mean():.4f}, true {true_gain.mean():.4f}, difference {error.mean():.4f} +- "
            f"{error.std(ddof=1) / count**0.5:.4f} (without the correction "
            f"{(plain - true_gain).mean():.4f}); {covered.sum()} intervals contain the true gain; "
            f"{certain.sum()} gains are certain, of which {(certain & (true_gain <= 0)).sum()} are "
            "not true",
            flush=True,
        )
    print(f"{(time.process_time() - start) / num_tables:.1f} s of CPU time per table")


def power_laws(weights: Array, scale: Array, transfer: Array, exponent: Array) -> Array:
    """Return a (t.w + 0.02)^-b [n, m] of mixtures [n, k], with a and b [m] and t [m, k]."""
    losses: Array = scale * (weights @ transfer.T + 0.02) ** -exponent
    return losses


def five_domains(folder: Path, splits: int) -> None:
    """Print errors of the mean of five losses, and the coverage of 90% intervals."""
    (path,) = folder.glob("five_domains_70m_*.csv")
    data = np.loadtxt(path, delimiter=",", skiprows=1)
    rows, losses = data[:, :5], data[:, 5:]
    errors, covered = [], []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(rows))
        fitted, held_out = np.split(order, [FITTED_OF_FIVE_DOMAINS])
        surrogate = fit_surrogate(rows[fitted], losses[fitted])
        measured = losses[held_out]
        errors.append(
            {
                model: np.abs(predicted.mean(axis=1) - measured.mean(axis=1)).mean()
                for model, predicted in predictions(surrogate, rows[held_out]).items()
            }
        )
        covered.append(coverage(surrogate, rows[held_out], measured))
    means = pd.DataFrame(errors).mean()
    line = ", ".join(f"{model} {error:.4f}" for model, error in means.items())
    print(f"five domains, {splits} splits: error {line}; coverage {np.mean(covered):.3f}")


def predictions(surrogate: Surrogate, mixtures: Array) -> dict[str, Array]:
    """Return the predictions [n, m] of each model, and of their stack."""
    predicted = {name: model(mixtures) for name, model in surrogate.models.items()}
    return {**predicted, "stack": surrogate.mean(mixtures)}


def coverage(surrogate: Surrogate, mixtures: Array, losses: Array) -> Array:
    """Return whether the 90% interval of each loss [n, m] contains it."""
    mean, error = surrogate.predict(mixtures)
    return np.abs(losses - mean) < norm.ppf(0.95) * error


if __name__ == "__main__":
    main()
