"""Thresholds of the off-policy correction, as they stand in the config.

A threshold is a number (an upper bound) or the text "lo_hi" (both bounds). The config checks them
with these functions when it is read; `learner/correction.py` reads them with the same functions.

In YAML a pair must be quoted: the number rules of YAML (and of Python) skip underscores, so that a
bare 0.5_2 is the number 0.52.
"""

import math

REJECTION_MODES = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "icepop",
)


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """`2.0` → (None, 2.0); `"0.5_2.0"` → (0.5, 2.0). Bounds are positive; the upper may be inf.

    Raises ValueError for anything else.
    """
    low_text, has_lower, high_text = str(threshold).strip().rpartition("_")
    try:
        upper = float(high_text)
        lower = float(low_text) if has_lower else None
    except ValueError:
        raise ValueError(f"threshold {threshold!r}: expected a number (2.0) or two joined by '_' ('0.5_2.0')") from None
    bounds = [upper] if lower is None else [lower, upper]
    if any(math.isnan(bound) or bound <= 0 for bound in bounds):
        raise ValueError(f"threshold {threshold!r}: bounds must be positive")
    if lower is not None and lower > upper:
        raise ValueError(f"threshold {threshold!r}: the lower bound is above the upper")
    return lower, upper


def parse_rejection(mode: str, threshold: float | str) -> list[tuple[str, float, float]]:
    """Criteria of a rejection mask as `(mode, lower, upper)`, one for each mode.

    Several modes are joined by commas and all of them must hold; their thresholds are joined the
    same way, or one threshold serves all. `*_k1` and `icepop` bound a ratio on both sides (a
    single bound `u` means `1/u` to `u`); the others measure a distance and have an upper bound.

    Raises ValueError for a name that is not in `REJECTION_MODES` or a threshold that does not fit.
    """
    modes = [name.strip() for name in mode.split(",") if name.strip()]
    thresholds = [text.strip() for text in str(threshold).split(",") if text.strip()]
    if not modes:
        raise ValueError(f"no rejection mode in {mode!r}; choose from {', '.join(REJECTION_MODES)}")
    if len(thresholds) == 1:
        thresholds *= len(modes)
    if len(thresholds) != len(modes):
        raise ValueError(f"{len(modes)} rejection modes but {len(thresholds)} thresholds")
    return [_criterion(name, text) for name, text in zip(modes, thresholds, strict=True)]


def _criterion(mode: str, threshold: str) -> tuple[str, float, float]:
    if mode not in REJECTION_MODES:
        raise ValueError(f"rejection mode {mode!r}: choose from {', '.join(REJECTION_MODES)}")
    lower, upper = parse_threshold(threshold)
    if mode == "icepop" or mode.endswith("_k1"):
        lower = 1 / upper if lower is None else lower
        if lower > upper:
            raise ValueError(f"threshold {threshold!r} of {mode}: a single bound must be ≥ 1")
        return mode, lower, upper
    if lower is not None:
        raise ValueError(f"threshold {threshold!r} of {mode}: only an upper bound makes sense")
    return mode, 0.0, upper
