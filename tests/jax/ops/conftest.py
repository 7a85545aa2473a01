"""A mesh over the eight simulated devices."""

import jax
import pytest
from jax.sharding import AxisType, Mesh


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
