"""Tests of Leeway."""
