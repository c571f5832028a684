"""Methods named in [fold]: estimators, group filters, reward transforms and trajectory rules (policies)."""
