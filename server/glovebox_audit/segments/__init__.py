"""Sealed segments of the audit log: names and places, seals, trees and proofs, and retention."""
