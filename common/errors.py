"""Every error Leeway raises, in one tree.

LeewayError
├── ConfigError      a bad configuration or input, found before work starts (exit code 2)
├── WireError        a message that breaks the schema or its limits
├── LedgerError      a request the ledger refuses; a damaged ledger
│   └── NoSignalError  nothing comes that could be trained: data, model or reward are wrong (exit code 2)
├── ControlError     Redis: unreachable, refused, or in contradiction with this process
├── WeightError      a publication that failed, was torn, or was refused
│   ├── OtherModelError  an engine was started with another model than the learner's (exit code 2)
│   └── DisprovedError  an engine computes something else with the weights than the learner
├── EngineError      the sampling engine failed, or was used wrongly
│   └── RequestCancelled  a request was ended early, on demand
├── TrainingError    the training has gone wrong for good (exit code 2)
├── FencedError      this process lost its epoch to a newer one (exit code 2: it must not take it back)
│   └── RolledBackError  the weights it holds were given up; started again, it goes on from a checkpoint (exit code 3)
├── CheckpointError  a checkpoint that is missing, damaged or foreign
├── ReplayError      recorded rollouts that cannot be trained, or not to the recorded weights (exit code 2)
├── DeadlineError    a named wait that reached its limit
└── Stopped          this process was told to stop while it waited (exit code 0)

A message says what happened, where, and what to do.
"""


GO_BACK = 3  # exit code of a role that is to be started again, and not because it failed


class LeewayError(Exception):
    """Base of all errors; ``exit_code`` is what a role that ends by it returns."""

    exit_code = 1


class ConfigError(LeewayError):
    """All faults of a configuration at once, one line each."""

    exit_code = 2

    def __init__(self, faults: list[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class WireError(LeewayError):
    """A message that is not what the schema says; ``reason`` is a short word to count by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class LedgerError(LeewayError):
    pass


class NoSignalError(LedgerError):
    exit_code = 2  # a restart would not mend it


class ControlError(LeewayError):
    pass


class WeightError(LeewayError):
    pass


class OtherModelError(WeightError):
    exit_code = 2  # a restart would not mend it


class DisprovedError(WeightError):
    def __init__(self, difference: float, what: str) -> None:
        self.difference = difference
        super().__init__(what)


class EngineError(LeewayError):
    pass


class RequestCancelled(EngineError):
    pass


class TrainingError(LeewayError):
    exit_code = 2  # a restart would only redo it


class FencedError(LeewayError):
    exit_code = 2  # a restart would take the run back from the newer one


class RolledBackError(FencedError):
    exit_code = GO_BACK


class CheckpointError(LeewayError):
    pass


class ReplayError(LeewayError):
    exit_code = 2


class DeadlineError(LeewayError):
    def __init__(self, waiting_for: str, waited_s: float, remedy: str = "") -> None:
        self.waiting_for = waiting_for
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"waited {waited_s:.1f} s for {waiting_for}{tail}")


class Stopped(LeewayError):
    exit_code = 0

    def __init__(self, waiting_for: str = "") -> None:
        super().__init__(f"told to stop while waiting for {waiting_for}" if waiting_for else "told to stop")
