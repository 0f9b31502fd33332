"""How far results in float32 may be apart; argued for in test_attention and test_linear."""

ATTENTION_TOLERANCE = 1e-5


def linear_tolerance(in_features: int) -> float:
    return 6e-8 * in_features + 1e-6
