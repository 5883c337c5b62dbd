"""How N workers differ from N copies of the one that was measured: `Scenario`."""

from dataclasses import dataclass

from mgwfbp.errors import SimulationError
from mgwfbp.record import check_count, check_real
from mgwfbp.units import plural

__all__ = ["IDEAL", "MAX_JITTER", "Scenario", "check_factors"]

# A standard deviation of 3 already means that every sixth worker takes 20 times as long; beyond it times overflow.
MAX_JITTER = 3.0


@dataclass(frozen=True, slots=True)
class Scenario:
    r"""What happens on the workers and on the link that the trace and the cost do not say.

    **Jitter.** Computation takes :math:`e^{\sigma z}` times what the trace says, with :math:`\sigma` ``jitter`` and z a
    standard normal: log-normal with median 1. ``jitter_shared``, :math:`\rho`, is the share of the variance that
    all computation of one worker in one step has in common:
    :math:`z = \sqrt\rho\, z_{worker, step} + \sqrt{1-\rho}\, z_{worker, step, gradient}`. At 1 a worker is slower or
    faster for a whole step, at 0 every gradient has its own luck and much of it cancels.

    [Note: mirrored steps] Steps are drawn in pairs, the second with -z for the first's z. Seen as a function of
    :math:`\sigma`, with the seed fixed, a step is a maximum of sums of constants and exponentials of :math:`\sigma`,
    hence convex; the mean over pairs is also even, and an even convex function never falls from 0 upwards. So **more
    jitter never makes the mean step faster**, for every seed and not only on average. It needs no more of the
    workers than that times add up and the slowest counts. Each step for itself is distributed as if drawn alone, so
    the mean is unbiased. The proof leaves out ``contention`` together with ``in_flight`` above 1.

    **Contention.** While a message is under way all computation takes ``contention`` times as long.

    **Messages in flight.** With ``in_flight`` K, message g may start once g - K has ended. Messages in flight share the
    link so: their start-up times, T(0), run side by side; their bytes, T(M) - T(0), go one message after the other,
    in order, each at the full rate. So what a second message can gain is the start-up time, never bandwidth.

    >>> Scenario(jitter=0.05, stragglers=(1.5,), steps=100).slowest(workers=8)
    1.5
    """

    jitter: float = 0.0  # sigma: about the relative spread of a worker's computation
    jitter_shared: float = 1.0  # rho, 0 to 1
    stragglers: tuple[float, ...] = ()  # so many workers are always slower, each by its factor
    contention: float = 1.0  # 1: messages do not disturb computation
    in_flight: int = 1
    steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, limit in (("jitter", MAX_JITTER), ("jitter_shared", 1.0)):
            value = check_real(getattr(self, name), name, SimulationError)
            if value > limit:
                raise SimulationError(f"{name} is {value:g}, expected 0 to {limit:g}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "stragglers", check_factors(self.stragglers, "stragglers"))
        object.__setattr__(self, "contention", check_factors((self.contention,), "contention")[0])
        for name, minimum in (("in_flight", 1), ("steps", 1), ("seed", 0)):
            count = check_count(getattr(self, name), name, SimulationError, minimum=minimum)
            object.__setattr__(self, name, count)
        if self.jitter and self.steps % 2:
            raise SimulationError(
                f"steps is {self.steps}, expected an even number: steps with jitter are drawn in mirrored pairs"
            )

    def slowest(self, workers: int) -> float:
        """Return how much slower than the trace the slowest of ``workers`` is, jitter aside."""
        self.check_workers(workers)
        return max(self.stragglers, default=1.0)

    def check_workers(self, workers: int) -> None:
        """Raise unless there are at least as many workers as stragglers."""
        if len(self.stragglers) > workers:
            raise SimulationError(
                f"{len(self.stragglers)} stragglers among {plural(workers, 'worker')}, expected at most so many"
            )


def check_factors(values: object, what: str) -> tuple[float, ...]:
    """Return factors by which something is slower, or raise unless each is a finite number of 1 or more."""
    if not isinstance(values, (tuple, list)):
        raise SimulationError(f"{what} is {values!r}, expected a sequence of numbers")
    factors = tuple(check_real(value, what, SimulationError) for value in values)
    for factor in factors:
        if factor < 1:
            raise SimulationError(f"{what}: {factor:g} times slower, expected 1 or more")
    return factors


IDEAL = Scenario()
