"""Servers under bad inputs, leaving clients, dying engines and lost databases."""
