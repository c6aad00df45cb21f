"""Low-dimensional spectra from neural collapse: closed forms, curvature operators, eigensolvers."""
