"""Figures of Leeway, as ratios measured in one run (`make bench`)."""
