"""Fixtures that several activity tests share."""

from tests.inference_pools import catalogue, model_cache, pool, studio
from tests.object_stores import s3_endpoint

__all__ = ["catalogue", "model_cache", "pool", "s3_endpoint", "studio"]
