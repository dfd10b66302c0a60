"""Random training programs, each a small step, compared with fp64 and shrunk when it fails.

`tree`: a program as data. `vocabulary`: the statements it may hold. `generate`: seed to program.
`render`: program to a standalone test file, which is what runs. `control`: eager's own rounding
under other roundings. `check`: a program's verdict. `shrink`: a failure made small.
`python -m tests.gradients.programs --start 0 --count 100` runs a range of seeds.
"""
