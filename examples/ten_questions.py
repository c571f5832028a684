"""Ten questions about a run, in SQL, over the index that `turnlog log index build` makes.

usage: python examples/ten_questions.py runs/ID/index.sqlite
Each question may also be given to `turnlog log query`; docs/index-schema.md lists tables and columns.
"""

from __future__ import annotations

import sys
from pathlib import Path

from turnlog.consumers.index.query import Answer, ask

QUESTIONS = {
    "How does the reward of each task change with the weights that sampled it?": """
        SELECT task_id, version_min AS version, count(*) AS sessions, avg(reward) AS reward
        FROM sessions WHERE reward IS NOT NULL GROUP BY task_id, version_min ORDER BY task_id, version_min""",
    "Which tools fail, how, and how long do they take?": """
        SELECT tool, status, count(*) AS calls, avg(duration_s) AS seconds
        FROM tool_calls GROUP BY tool, status ORDER BY calls DESC""",
    "Are long answers rewarded?": """
        SELECT output_tokens / 256 * 256 AS tokens_from, count(*) AS sessions, avg(reward) AS reward
        FROM sessions WHERE reward IS NOT NULL GROUP BY tokens_from ORDER BY tokens_from""",
    "What did trees mask, and why?": """
        SELECT key AS reason, sum(value) AS tokens FROM trees, json_each(trees.masked)
        GROUP BY reason ORDER BY tokens DESC""",
    "What did draws leave out, and why?": """
        SELECT reason, count(*) AS samples, sum(sampled_tokens) AS tokens FROM batch_drops
        GROUP BY reason ORDER BY tokens DESC""",
    "Which sessions were slowest, and where did their time go?": """
        SELECT s.session_id, (s.finished_ms - s.started_ms) / 1000.0 AS seconds,
            (SELECT sum(total_s) FROM turns t WHERE t.session_id = s.session_id) AS generating,
            (SELECT sum(duration_s + queue_s) FROM tool_calls c WHERE c.session_id = s.session_id) AS calling
        FROM sessions s WHERE s.finished_ms IS NOT NULL ORDER BY seconds DESC LIMIT 10""",
    "How stale was what each step trained?": """
        SELECT s.step, b.max_lag, s.lag_max, b.trainer_version, s.reward_mean FROM steps s
        JOIN batches b ON b.batch_index = s.batch_index ORDER BY s.step""",
    "Which tasks has the newest checkpoint seen, and how often?": """
        SELECT s.task_id, count(DISTINCT r.session_id) AS sessions, sum(r.trained_tokens) AS tokens
        FROM batch_rows r JOIN sessions s ON s.session_id = r.session_id
        WHERE r.batch_index <= (SELECT max(batch_index) FROM versions) GROUP BY s.task_id ORDER BY tokens DESC""",
    "Which groups teach nothing, because all their rewards are equal or too few?": """
        SELECT status, reason, count(*) AS groups FROM groups GROUP BY status, reason ORDER BY groups DESC""",
    "What became of every session?": """
        SELECT fate, outcome, count(*) AS sessions, sum(output_tokens) AS sampled, sum(trained_tokens) AS trained
        FROM sessions GROUP BY fate, outcome ORDER BY sessions DESC""",
}


def answers(path: Path) -> dict[str, Answer]:
    """Question -> its answer."""
    return {question: ask(path, sql) for question, sql in QUESTIONS.items()}


def main() -> int:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for question, answer in answers(Path(sys.argv[1])).items():
        print(f"\n{question}\n  {' | '.join(answer.columns)}")
        for row in answer.rows[:10]:
            print("  " + " | ".join(ascii(value) for value in row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
