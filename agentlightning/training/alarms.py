"""Alarms of a training run: one when a condition begins, one when it ends.

A rule is a pure function of the metrics of all steps so far (at least one). It returns None if its metrics are missing.
Its keyword arguments are its thresholds, which the setting `alarms=` changes by name.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, pstdev
from typing import Any, Final, Literal, cast

from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError, closest_name
from agentlightning.training.progress import StepFigures, excluded_text
from agentlightning.utils.setting_checks import Bounds, check_number

AlarmSettings = Literal["default", "none"] | Mapping[str, Mapping[str, float] | None]
"""`default`: every rule. `none`: no rule. A mapping changes thresholds of some rules, by rule and threshold; None
instead of thresholds switches a rule off."""
Steps = Sequence[StepFigures]
Thresholds = Mapping[str, float]

_BOUNDS: Final = {"margin": Bounds(at_least=0, below=1), "factor": Bounds(above=1)}
"""Limits of thresholds; all other thresholds are numbers of at least 0."""
_LARGEST: Final = 1e300
"""Rewards are clipped to this size, so that sums and deviations of a window stay finite."""
_ROUNDING: Final = 1e-9
"""Rounding error of a mean reward, as a share of it."""
_LEAST_PAIRS: Final = 6
"""Smallest number of pairs for which the exact test can have a p-value below 0.05."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The beginning or the end of a condition."""

    name: str
    """Name of the rule."""
    state: Literal["raised", "over"]
    step: int
    since: int
    """The step after which the alarm was raised; for `raised` the same as `step`."""
    value: float
    threshold: float
    text: str
    """The finding with its values, in one sentence."""
    what_to_try: str
    """Advice, the most likely to help first; empty for `over`."""

    @property
    def line(self) -> str:
        """The alarm as one line of text."""
        if self.state == "over":
            return f"step {self.step}: alarm {self.name} (since step {self.since}) is over: {self.text}"
        return f"step {self.step}: alarm {self.name}: {self.text}. To try: {self.what_to_try}"

    def data(self) -> dict[str, Any]:
        """Return the data of an `alarm` record without its name and text."""
        return {name: getattr(self, name) for name in ("state", "since", "value", "threshold", "what_to_try")}


class Alarms:
    """Watches the steps of one run. The alarms depend only on the metrics of the steps; a resumed run passes the
    earlier steps first."""

    def __init__(self, settings: object = "default", other_names: Mapping[str, str] | None = None) -> None:
        """Create the rules; `other_names` maps GRPO's setting names to those of the algorithm."""
        self._other_names = other_names or {}
        self._rules = make_rules(settings)
        self._steps: list[StepFigures] = []
        self._since: dict[str, int] = {}  # raised alarms, by rule
        self._in_a_row = Counter[str]()  # consecutive steps by rule, up to the last one that measured it

    def see(self, figures: StepFigures) -> list[Alarm]:
        """Return the alarms that are raised or over after a step."""
        self._steps.append(figures)
        measured = [(rule, rule.measure(self._steps)) for rule in self._rules]
        alarms = [self._compare(rule, finding, figures.step) for rule, finding in measured if finding is not None]
        return [alarm for alarm in alarms if alarm is not None]

    def _compare(self, rule: Rule, measurement: Measurement, step: int) -> Alarm | None:
        name, thresholds, since = rule.name, rule.thresholds, self._since.get(rule.name)
        if since is None:
            turns, needed = measurement.is_bad, thresholds["patience"]
        else:
            turns, needed = measurement.is_fine(thresholds["margin"]), rule.rest(thresholds)
        self._in_a_row[name] = self._in_a_row[name] + 1 if turns else 0
        if self._in_a_row[name] < needed:
            return None
        self._in_a_row[name] = 0
        value, threshold, text = measurement.value, measurement.threshold, measurement.text
        if since is not None:
            del self._since[name]
            return Alarm(name, "over", step, since, value, threshold, text, "")
        self._since[name] = step
        return Alarm(name, "raised", step, step, value, threshold, text, self._renamed(rule.what_to_try))

    def _renamed(self, what_to_try: str) -> str:
        """Return the text with the algorithm's names of settings; two settings with one name here appear once."""
        for name, own in self._other_names.items():
            what_to_try = re.sub(rf"\b{name}\b", own, what_to_try)
        return re.sub(r"\b(\w+) and \1\b", r"\1", what_to_try)


# --- the setting `alarms` --------------------------------------------------------------------------------------------


def make_rules(settings: object) -> list[Rule]:
    """Return the rules of a run, from its setting `alarms`; see `AlarmSettings`.

    Raises:
        BadRequestError: a rule or a threshold is unknown (names the nearest valid one), or a value is out of range.
    """
    if settings in ("default", "none"):
        return [] if settings == "none" else list(RULES.values())
    if not isinstance(settings, Mapping):
        raise BadRequestError(
            "alarms must be 'default', 'none', or a dict of thresholds by rule, such as "
            f"{{'entropy_collapse': {{'share': 0.05}}, 'token_drift': None}}; got {settings!r}"
        )
    changes = cast("Mapping[Any, Any]", settings)
    for name in changes:
        if name not in RULES:
            raise BadRequestError(f"alarms: unknown rule {name!r}{_hint(name, RULES)}")
    return [_changed(rule, changes.get(name, {})) for name, rule in RULES.items() if changes.get(name, {}) is not None]


def _changed(rule: Rule, changes: object) -> Rule:
    """Return a rule with other thresholds, after checking them."""
    if not isinstance(changes, Mapping):
        names = ", ".join(rule.thresholds)
        raise BadRequestError(f"alarms: {rule.name} must be a dict of thresholds ({names}) or None; got {changes!r}")
    for name, value in cast("Mapping[Any, Any]", changes).items():
        if name not in rule.thresholds:
            raise BadRequestError(f"alarms: {rule.name} has no threshold {name!r}{_hint(name, rule.thresholds)}")
        is_count = isinstance(rule.thresholds[name], int)
        bounds = Bounds(at_least=1) if is_count else _BOUNDS.get(name, Bounds(at_least=0))
        check_number(f"alarms: {rule.name}.{name}", value, int if is_count else float, bounds)
    return dataclasses.replace(rule, thresholds={**rule.thresholds, **changes})


def _hint(name: object, names: Mapping[str, Any]) -> str:
    near = closest_name(name, list(names)) if isinstance(name, str) else None
    return f". Did you mean {near!r}?" if near else f". Valid names: {', '.join(names)}"


# --- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measurement:
    """The finding of a rule after a step."""

    value: float
    threshold: float
    text: str
    """The finding as one sentence with its values, without a full stop."""
    is_bad: bool
    """Whether the value is beyond the threshold."""
    below: bool = False
    """Whether bad values are below the threshold, not above it."""

    def is_fine(self, margin: float) -> bool:
        """Return whether the value is better than the threshold by at least a share of it. A value that is neither bad
        nor fine does not change an alarm."""
        slack = abs(self.threshold) * margin
        return self.value >= self.threshold + slack if self.below else self.value <= self.threshold - slack


Condition = Callable[..., Measurement | None]
Rest = Callable[[Thresholds], float]


@dataclass(frozen=True)
class Rule:
    """A condition and its thresholds."""

    name: str
    what_to_try: str
    """Advice, the most likely to help first."""
    condition: Condition
    thresholds: Thresholds
    """`patience`: number of consecutive bad steps before an alarm. `margin`: distance of a fine value from the
    threshold, as a share of it. All others belong to the condition."""
    rest: Rest = itemgetter("patience")
    """Function that returns the number of consecutive fine steps after which an alarm is over."""

    def measure(self, steps: Steps) -> Measurement | None:
        """Return the measurement after the last step; None if metrics are missing."""
        names = inspect.signature(self.condition).parameters
        return self.condition(steps, **{name: value for name, value in self.thresholds.items() if name in names})


RULES: dict[str, Rule] = {}
"""Every rule by the name of its alarms."""


def _rule(
    what_to_try: str, *, patience: int = 2, margin: float = 0.1, rest: Rest = itemgetter("patience")
) -> Callable[[Condition], Condition]:
    def register(condition: Condition) -> Condition:
        name, parameters = condition.__name__, inspect.signature(condition).parameters.values()
        own = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        RULES[name] = Rule(name, what_to_try, condition, {"patience": patience, "margin": margin, **own}, rest)
        return condition

    return register


def _compared(
    value: float | None, threshold: float, text: str, *, below: bool = False, **more: object
) -> Measurement | None:
    """Return a measurement that is bad above (or below) the threshold. `text` is a format string of `value`,
    `threshold` and the other arguments."""
    if value is None:
        return None
    is_bad = value < threshold if below else value > threshold
    return Measurement(value, threshold, text.format(value=value, threshold=threshold, **more), is_bad, below)


def _number(value: object) -> float | None:
    """Return a metric as a finite number; None if it is missing or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _updated(figures: StepFigures, name: str) -> float | None:
    """Return a metric of a step's update; None if the step had no update."""
    return _number(figures.update.get(name)) if _number(figures.update.get("steps")) else None


def _start_of(values: Sequence[float | None], count: int) -> float | None:
    """Return the mean of the first `count` numbers; None if there is no later one to compare with it."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers[:count]) / count if len(numbers) > count else None


def _bounded(figures: Iterable[float | None]) -> list[float]:
    numbers = (_number(figure) for figure in figures)
    return [max(-_LARGEST, min(_LARGEST, figure)) for figure in numbers if figure is not None]


@_rule(
    "increase max_completion_length; set soft_punish_cache, which lowers the reward of long replies; set "
    "mask_truncated_completions=True, which excludes truncated rollouts from the loss; request shorter replies in the "
    "prompt"
)
def cut_off(steps: Steps, *, limit: float = 0.3) -> Measurement | None:
    """Many calls end at `max_completion_length`, not at a stop token. `limit`: maximum share of a step's calls."""
    text = "{value:.0%} of the calls ended at max_completion_length (limit {threshold:.0%})"
    return _compared(_number(steps[-1].cut_share), limit, text)


@_rule(
    "start a new run with a smaller learning_rate, such as a tenth; use larger batches (batch_size, num_generations); "
    "reduce num_iterations; reduce max_grad_norm",
    patience=1,
)
def early_fall(steps: Steps, *, window: int = 4, share: float = 0.5, deviations: float = 3.0) -> Measurement | None:
    """The mean reward has fallen far below that of the first step, before `reward_jump` has steps to compare with.

    `window`: steps after the first one. `share`: minimum fall, as a share of the first mean reward. `deviations`:
    minimum fall, in standard errors of the difference.
    """
    first, now = steps[0], steps[-1]
    before, after = _number(first.mean_reward), _number(now.mean_reward)
    error, other = _number(first.reward_error), _number(now.reward_error)
    if before is None or after is None or error is None or other is None:
        return None
    threshold = max(share * abs(before), deviations * math.hypot(error, other))
    fall = before - after
    if not (math.isfinite(threshold) and math.isfinite(fall)):
        return None
    text = f"mean reward fell to {after:.3g}, from {before:.3g} in the first step (limit {threshold:.3g} below)"
    return Measurement(fall, threshold, text, is_bad=fall > threshold and len(steps) <= window + 1)


@_rule(
    "set importance_sampling_correction=True; set bf16=False, or use the same precision in engine and learner; use the "
    "temperature, top_p and chat template of the engine; with several iterations or mini-batches, reduce learning_rate"
)
def engine_mismatch(steps: Steps, *, limit: float = 0.2) -> Measurement | None:
    """Learner and engine compute different token probabilities with the same weights.

    `limit`: maximum `|ratio - 1|` of any token of these weights before the first optimizer step. Usual values: 0.2 for
    bfloat16, below 0.001 for float32.
    """
    text = "before the update, a token's ratio of learner to engine differs from 1 by {value:.3g} (limit {threshold:g})"
    return _compared(_updated(steps[-1], "first_ratio_error"), limit, text)


@_rule(
    "set entropy_coef, such as 0.001; increase epsilon_high; reduce learning_rate; set temperature to 1; use tasks "
    "that reward more than one answer"
)
def entropy_collapse(steps: Steps, *, share: float = 0.1, reference_steps: int = 3) -> Measurement | None:
    """The entropy of the policy has fallen to a small share of its mean in the first steps. `share`: minimum share.
    `reference_steps`: number of first steps; only steps with an update count."""
    entropies = [_updated(figures, "entropy") for figures in steps]
    start = _start_of(entropies, reference_steps)
    if start is None:
        return None
    text = "entropy is {value:.3g} nats per token, {start:.3g} in the first {count} steps (limit {threshold:.3g})"
    return _compared(entropies[-1], share * start, text, below=True, start=start, count=reference_steps)


@_rule(
    "check the rewards: if all are at the maximum, use harder tasks; if all are at the minimum from the start, use "
    "easier tasks, partial credit, or a warm start; if they fell to the minimum, reduce learning_rate and use larger "
    "batches; increase num_generations or temperature; set max_num_gen_batches=3 to replace such groups with other "
    "tasks, or curriculum='solve_rate' to draw such tasks less often",
    patience=3,
)
def equal_rewards(steps: Steps, *, limit: float = 0.9) -> Measurement | None:
    """Nearly all groups of a step have equal rewards, so their advantages are zero. `limit`: maximum share of
    groups."""
    compared, equal = _number(steps[-1].groups.get("compared")), _number(steps[-1].groups.get("equal_rewards"))
    if not compared or equal is None:
        return None
    mean = _number(steps[-1].mean_reward)
    level = "" if mean is None else f", mean reward {mean:.3g}"
    text = "all rewards are equal in {equal:.0f} of {compared:.0f} groups{level} (limit {threshold:.0%})"
    return _compared(equal / compared, limit, text, equal=equal, compared=compared, level=level)


@_rule(
    "use the checkpoint of the best evaluation (agl runs show); read rollouts of the training tasks with a high "
    "reward; set beta above 0; reduce learning_rate; add training tasks",
    patience=1,
)
def held_out_drop(steps: Steps, *, limit: float = 0.1, significance: float = 0.05) -> Measurement | None:
    """The mean reward on held-out tasks is below the best so far; with enough pairs, the paired test must confirm it.
    The policy may exploit the reward of the training tasks, or memorize them.

    `limit`: maximum drop, as a share of the range of the rewards of both evaluations. `significance`: a drop with a
    p-value of at least this is treated as chance.
    """
    now, change = _number(steps[-1].held_out), steps[-1].held_out_change
    if now is None:
        return None
    if not change:  # this is the first evaluation, or no task has a reward in both
        best = max(value for figures in steps if (value := _number(figures.held_out)) is not None)
        text = "held-out mean reward is {now:.4g}; the best was {best:.4g} (limit {threshold:g} below)"
        return _compared(best - now, limit, text, now=now, best=best)
    threshold = limit * change["range"]
    text = (
        f"held-out mean reward is {now:.4g}; the best was {change['best']:.4g} after update {change['updates']} "
        f"(limit {threshold:.3g} below), p = {change['p_value']:.2g} over {counted(int(change['pairs']), 'task')}"
    )
    loss, is_chance = -change["change"], change["pairs"] >= _LEAST_PAIRS and change["p_value"] >= significance
    return Measurement(loss, threshold, text, is_bad=loss > threshold and not is_chance)


@_rule(
    "find the errors with agl rollouts list --outcome infrastructure_fault and agl rollouts explain; check the agent's "
    "own services and keys; increase infrastructure_retries in rollout_config; increase rollout_timeout_seconds",
    patience=1,
)
def infrastructure(steps: Steps, *, limit: float = 0.5) -> Measurement | None:
    """Most rollouts of a step ended with an infrastructure error. `limit`: maximum share of a step's rollouts."""
    figures = steps[-1]
    rollouts = figures.rollouts_done + figures.rollouts_failed
    if not rollouts:
        return None
    faults = _number(figures.rollouts_excluded.get("infrastructure_fault")) or 0.0
    text = "{faults:.0f} of {rollouts} ended with an infrastructure error (limit {threshold:.0%})"
    return _compared(faults / rollouts, limit, text, faults=faults, rollouts=counted(rollouts, "rollout"))


@_rule(
    "read a few rollouts to check whether the reward favours long or short replies; set soft_punish_cache and "
    "overlong_penalty_factor if replies grow; set loss_type='dr_grpo' or aggregation='constant', whose token weights "
    "do not depend on length; set beta above 0"
)
def length_drift(steps: Steps, *, factor: float = 2.0, reference_steps: int = 3) -> Measurement | None:
    """The replies are longer or shorter than in the first `reference_steps` steps by more than a factor of `factor`."""
    lengths = [_number(figures.completion_tokens) for figures in steps]
    start, now = _start_of(lengths, reference_steps), lengths[-1]
    if not start or now is None:
        return None
    shrunk = now < start
    threshold = start / factor if shrunk else start * factor
    text = "replies have {value:.1f} tokens on average, {start:.1f} in the first {count} steps (limit {threshold:.1f})"
    return _compared(now, threshold, text, below=shrunk, start=start, count=reference_steps)


@_rule(
    "make the agent call the endpoint of the resource that it receives (llm.endpoint), with the model llm.model; run "
    "agl rollouts explain to see what was recorded of a rollout",
    patience=1,
    margin=0.0,
)
def no_calls(steps: Steps) -> Measurement | None:
    """No rollout of a step has a model call that came through the gateway."""
    figures = steps[-1]
    rollouts = figures.rollouts_done + figures.rollouts_failed
    if not rollouts:
        return None
    text = "model calls captured in {rollouts}: {value}"
    return _compared(figures.calls_captured, 1, text, below=True, rollouts=counted(rollouts, "rollout"))


@_rule(
    "read the reasons in the ledger: agl runs ledger RUN; for equal_rewards, see the alarm with that name; for "
    "no_reward, return or emit a reward from the agent",
    margin=0.0,
)
def nothing_trained(steps: Steps) -> Measurement | None:
    """No model call of a step was trained."""
    figures = steps[-1]
    text = "calls used for training: {value} of {captured}; {reasons}"
    captured, reasons = figures.calls_captured, excluded_text(figures.calls_excluded)
    return _compared(figures.calls_trained, 1, text, below=True, captured=captured, reasons=reasons)


@_rule(
    "reduce learning_rate; reduce num_iterations; reduce epsilon and epsilon_high; reduce max_grad_norm; use larger "
    "batches",
    patience=1,
    rest=lambda thresholds: max(2, thresholds["patience"]),
)
def policy_shift(steps: Steps, *, limit: float = 0.5) -> Measurement | None:
    """An update changes the policy by a large amount. `limit`: maximum estimated KL divergence per token of the policy
    before the update from the one after it, in nats; the first updates of a small model reach 0.2."""
    # if the trainer does not measure it after the last step: the mean over its steps, of fresh tokens if known
    distances = (_updated(steps[-1], name) for name in ("update_kl", "fresh_kl", "approx_kl"))
    kl = next((value for value in distances if value is not None), None)
    clipped = _updated(steps[-1], "clip_fraction") or 0.0
    text = (
        "the update moved the policy by {value:.3g} nats per token, with {clipped:.1%} of the tokens clipped (limit "
        "{threshold:g})"
    )
    return _compared(kl, limit, text, clipped=clipped)


@_rule("increase beta; reduce learning_rate; change nothing if held-out rewards rise and the replies read well")
def reference_distance(steps: Steps, *, limit: float = 1.0) -> Measurement | None:
    """The divergence from the reference is large; only for runs with `beta` above 0. `limit`: maximum mean divergence
    per token, in nats."""
    text = "the policy is {value:.3g} nats per token from its reference (limit {threshold:g})"
    return _compared(_updated(steps[-1], "kl"), limit, text)


@_rule(
    "compare rollouts of the two steps; after a rise, read the best rollouts, because the policy may exploit the "
    "reward; after a fall, check failed rollouts and grad_norm: a service may be broken or the update too large; "
    "resume from the checkpoint before with a smaller learning_rate",
    patience=1,
    rest=itemgetter("window"),
)
def reward_jump(
    steps: Steps, *, effect_size: float = 0.5, deviations: float = 4.0, window: int = 5
) -> Measurement | None:
    """The mean reward differs from that of the previous steps by more than those differ from each other.

    `effect_size`: minimum change, in standard deviations of the rewards within a step (the largest of the window and
    the current step). `deviations`: minimum change, in standard deviations of the window's mean rewards. `window`:
    number of previous steps, and of steps without a jump until the alarm is over.
    """
    means = _bounded(figures.mean_reward for figures in steps)
    spreads = _bounded(figures.reward_spread for figures in steps)
    if _number(steps[-1].mean_reward) is None or len(means) <= window or not spreads:
        return None
    *before, now = means[-1 - window :]
    mean = fmean(before)
    spread = effect_size * max(spreads[-1 - window :])
    threshold = max(spread, deviations * pstdev(before), _ROUNDING * max(abs(mean), abs(now)))
    verb = "rose" if now >= mean else "fell"
    text = (
        "mean reward {verb} to {now:.3g}; the mean of the {window} steps before is {mean:.3g} "
        "(limit {threshold:.3g} from it)"
    )
    return _compared(abs(now - mean), threshold, text, verb=verb, now=now, window=window, mean=mean)


@_rule(
    "reduce max_staleness of agl.GRPO; use more or faster runners; reduce staleness_clip_max; reduce learning_rate, "
    "which keeps the versions closer to each other"
)
def stale_weights(
    steps: Steps, *, margin: float = 0.1, limit: float = 2.0, divergence: float = 0.5
) -> Measurement | None:
    """The weights that served the trained calls are several updates old, or far from the weights that learn. `limit`:
    maximum mean age, in updates. `divergence`: maximum estimated KL divergence of the weights that sampled stale tokens
    from those before the update, in nats per stale token."""
    age, distance = _number(steps[-1].versions_behind), _updated(steps[-1], "first_stale_kl")
    far = "the weights of stale tokens differ from the learner by {value:.3g} nats per token (limit {threshold:g})"
    measurements = (
        _compared(age, limit, "trained calls are {value:.2g} updates old on average (limit {threshold:g})"),
        _compared(distance, divergence, far),
    )
    available = [each for each in measurements if each is not None]
    return max(available, key=lambda each: (each.is_bad, not each.is_fine(margin)), default=None)


@_rule(
    "use a chat template that renders earlier turns unchanged (including reasoning); do not rewrite the model's "
    "messages in the agent; see such a turn with agl rollouts explain; set max_drift to end a run above a limit"
)
def token_drift(steps: Steps, *, limit: float = 0.1) -> Measurement | None:
    """The chat template or the tokenizer renders earlier turns as other tokens than were sampled, which splits rows.
    `limit`: maximum share of the run's turns so far."""
    text = "{value:.1%} of the turns so far were rendered as other tokens than were sampled (limit {threshold:.0%})"
    return _compared(_number(steps[-1].drift_rate), limit, text)
