"""A directed event of 9 nodes and its plans for 3 parts, written out by hand.

    part 0          part 1           part 2
  0 ----> 1 ------> 3 <----- 6 ----> 7
  |       ^         |        ^       |(twice)
  v       |         v        |       v
  2 ------+         4 -------+       8 <--+
  |                                  |    |
  +---------------------------> 5    +----+ a self-loop

Part 1 holds 3, 4, 5; part 2 holds 6, 7, 8. Need is one-way between 0 and 1: part 0 needs
nothing under `incoming`, though 1 -> 3 and 2 -> 5 leave it.
"""

import numpy as np

ASSIGNMENT = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])

# In global order: by (dst, src).
EDGES = [
    (0, 1),  # 0
    (2, 1),  # 1
    (0, 2),  # 2
    (1, 3),  # 3  cut 0 -> 1
    (6, 3),  # 4  cut 2 -> 1
    (3, 4),  # 5
    (2, 5),  # 6  cut 0 -> 1
    (4, 6),  # 7  cut 1 -> 2
    (6, 7),  # 8
    (7, 8),  # 9
    (7, 8),  # 10 twice
    (8, 8),  # 11 a self-loop
]
EDGE_INDEX = np.array(EDGES).T

INCIDENT = [
    {
        "owned_ids": [0, 1, 2],
        "ghost_ids": [3, 5],
        "edge_ids": [0, 1, 2, 3, 6],
        "edge_rows": [[0, 2, 0, 1, 2], [1, 1, 2, 3, 4]],
        "edge_owned": [True, True, True, False, False],
        "send_rows": [1, 2],
        "send_counts": [0, 2, 0],
        "recv_counts": [0, 2, 0],
    },
    {
        "owned_ids": [3, 4, 5],
        "ghost_ids": [1, 2, 6],
        "edge_ids": [3, 4, 5, 6, 7],
        "edge_rows": [[3, 5, 0, 4, 1], [0, 0, 1, 2, 5]],
        "edge_owned": [True, True, True, True, False],
        "send_rows": [0, 2, 0, 1],
        "send_counts": [2, 0, 2],
        "recv_counts": [2, 0, 1],
    },
    {
        "owned_ids": [6, 7, 8],
        "ghost_ids": [3, 4],
        "edge_ids": [4, 7, 8, 9, 10, 11],
        "edge_rows": [[0, 4, 0, 1, 1, 2], [3, 0, 1, 2, 2, 2]],
        "edge_owned": [False, True, True, True, True, True],
        "send_rows": [0],
        "send_counts": [0, 1, 0],
        "recv_counts": [0, 2, 0],
    },
]

INCOMING = [
    {
        "owned_ids": [0, 1, 2],
        "ghost_ids": [],
        "edge_ids": [0, 1, 2],
        "edge_rows": [[0, 2, 0], [1, 1, 2]],
        "edge_owned": [True, True, True],
        "send_rows": [1, 2],
        "send_counts": [0, 2, 0],
        "recv_counts": [0, 0, 0],
    },
    {
        "owned_ids": [3, 4, 5],
        "ghost_ids": [1, 2, 6],
        "edge_ids": [3, 4, 5, 6],
        "edge_rows": [[3, 5, 0, 4], [0, 0, 1, 2]],
        "edge_owned": [True, True, True, True],
        "send_rows": [1],
        "send_counts": [0, 0, 1],
        "recv_counts": [2, 0, 1],
    },
    {
        "owned_ids": [6, 7, 8],
        "ghost_ids": [4],
        "edge_ids": [7, 8, 9, 10, 11],
        "edge_rows": [[3, 0, 1, 1, 2], [0, 1, 2, 2, 2]],
        "edge_owned": [True, True, True, True, True],
        "send_rows": [0],
        "send_counts": [0, 1, 0],
        "recv_counts": [0, 1, 0],
    },
]
