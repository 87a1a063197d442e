"""Settings that every test shares: examples are drawn alike in every run, without a deadline."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "smat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("smat")
