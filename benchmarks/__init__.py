"""Programs that measure; each says at its top how it is run."""
