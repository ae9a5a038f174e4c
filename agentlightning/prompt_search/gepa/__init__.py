"""GEPA by the package `gepa`, on rollouts of the store."""
