"""What every role shares: configuration, the wire, weights, metrics, errors."""
