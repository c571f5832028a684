"""What the names in [fold] mean: a file for estimators, group filters, reward transforms, and one for each policy."""
