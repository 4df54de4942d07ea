"""Hooks of other trainers, translated into marks of a recording. Nothing else happens here."""
