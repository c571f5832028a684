"""Methods named in [fold]: modules for estimators, group filters, reward transforms and each trajectory rule
(policy).
"""
