// The sums of a run, and what the cache saved; its words are the legend of the tints.
import { session } from "../app/session";
import { count, counted, duration, percent } from "../charts/numbers";
import type { ProgramRun } from "./run";

export function Ledger({ run }: { run: ProgramRun }) {
  const { prompt, cached, output, forced, promptSoFar, outputSoFar } = run.totals.value;
  const numCut = run.numCut.value;
  const status = run.status.value;
  const seconds = run.duration.value;
  const says = [
    status === "running" && "Running.",
    status === "stopped" && "Stopped.",
    status === "done" && seconds !== null && `Done in ${duration(seconds)}.`,
    prompt > 0 && `The cache saved ${percent(cached / prompt)} of the prompts.`,
    numCut > 0 && `${counted(numCut, "text")} reached ${numCut === 1 ? "its" : "their"} maximum of tokens.`,
    forced > 0 && `The grammar forced ${percent(forced / output)} of the output.`,
    `Seed ${run.seed}.`,
  ].filter(Boolean);
  return (
    <section class="ledger" aria-label="Sums of the run" data-testid="ledger" data-status={status}>
      <dl>
        <Sum name="prompt tokens" id="prompt" value={sumOf(prompt, promptSoFar)} />
        <Sum name="from the cache" id="cached" isTinted value={prompt > 0 ? count(cached) : "–"} />
        <Sum name="computed" id="computed" value={prompt > 0 ? count(prompt - cached) : "–"} />
        <Sum name="generated" id="output" value={sumOf(output, outputSoFar)} />
        <Sum name="forced" id="forced" isTinted value={count(forced)} />
      </dl>
      <p class="ledger-line">{says.join(" ")}</p>
      {(status === "failed" || status === "stopped") && (
        <p class="ledger-line problem-line">
          <span dir="auto">{run.problem.value}</span>
          <button
            type="button"
            data-testid="go-on"
            disabled={!session.value}
            onClick={() => session.peek() && run.goOn(session.peek()!)}
          >
            Go on from here
          </button>
        </p>
      )}
    </section>
  );
}

/** A sum of which a part is an estimate. */
const sumOf = (reported: number, soFar: number): string => `${soFar > 0 ? "≈ " : ""}${count(reported + soFar)}`;

function Sum({ name, id, value, isTinted }: { name: string; id: string; value: string; isTinted?: boolean }) {
  return (
    <div>
      <dt>{isTinted ? <span class={id}>{name}</span> : name}</dt>
      <dd data-testid={`${id}-tokens`}>{value}</dd>
    </div>
  );
}
