"""Engines: the protocols that turnlog needs of one (protocol.py), and the kinds of engines that have them."""
