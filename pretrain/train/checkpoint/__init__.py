"""Checkpoints that do not depend on the layout: whatever saved them, one process or any number can read them.

    RUN/checkpoints/step_00001000/
        tensors_00003_00000.safetensors   rank 3's first file; files end at about 1 GiB
        index.json                        tensor -> kind -> dtype, global shape, and the slices that tile it
        state.json                        the TrainState
        config.yaml                       the resolved configuration of the run
        manifest.json                     written last: size and xxh3_64 of every other file, and of itself
    RUN/checkpoints/latest                name of the newest folder; a hint for people, the loader looks for itself
    RUN/checkpoints/abandoned/            steps after the one that a run went back to; never read, never deleted here

A tensor has the parameter's global name and a kind: `parameter`, or the optimizer's state key (`exp_avg`, `exp_avg_sq`,
`momentum`). A folder is filled under a hidden name, made durable and renamed, so that a folder called step_XXXXXXXX was
complete when it got its name; the manifest shows whether it still is.

    format.py      slices, index, manifest and their checks
    reader.py      CheckpointReader: any region of any tensor, without a process group
    writer.py      CheckpointWriter: the collective save, in the foreground or behind training
    placement.py   Placement: which region of which tensor this rank holds
    find.py        which checkpoint a run starts from
    folders.py     names of folders, retention, going back, disk space
    ranks.py       Ranks: agreement among processes
"""
