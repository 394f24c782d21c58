"""Speed of this package beside plain references, and studies of cost and error; docs/performance.md names the columns.

`make bench`, that is `python -m benchmarks`, prints one table: each case runs our side and a plain reference from
`benchmarks/plain` in turn, after it has asserted that both compute the same. A group of cases is one module.
"""
