# One job a notebook. `proofread run` (and `make run`) call this with a lock around it; plain
# `snakemake` works too, and a cluster takes the same file through a profile.
#
#   snakemake                                       every stale notebook, at book size
#   snakemake --config chapter=linear_core          one chapter
#   snakemake --config chapter=linear_core params=paper
#
# Which notebooks are stale is found here, while this file is read. Committed pairs are never
# declared as outputs: Snakemake would delete them when a job fails. A job's marker means nothing
# on its own, so the profile forces every job that this file lists.
import sys

from proofread.batch import jobs

PARAMS = config.get("params") or "book"
CHAPTER = config.get("chapter") or None
JOBS = jobs(CHAPTER, PARAMS, force=str(config.get("force", "")) == "1")


rule all:
    input:
        expand("_build/run/{params}/{job}.done", params=PARAMS, job=JOBS),


rule notebook:
    output:
        touch("_build/run/{params}/{slug}/{stem}.done"),
    log:
        "_build/run/{params}/{slug}/{stem}.log",
    resources:
        mem_mb=4608,
    threads: 1
    params:
        python=sys.executable,
    shell:
        "{params.python} -m proofread.notebooks {wildcards.slug}/{wildcards.stem} "
        "{wildcards.params} >{log} 2>&1 || status=$?; tail -n 1 {log}; exit ${{status:-0}}"
