// The sums of a run, and what the cache saved; its words are the legend of the tints.
import { session } from "../app/session";
import { count, duration, percent } from "../charts/numbers";
import type { ProgramRun } from "./run";


export function Ledger({ run }: { run: ProgramRun }) {
  const { prompt, cached, output, forced } = run.totals.value;
  const status = run.status.value;
  const seconds = run.duration.value;
  const says = [
    status === "running" && "Running.",
    status === "stopped" && "Stopped.",
    status === "done" && seconds !== null && `Done in ${duration(seconds)}.`,
    prompt > 0 && `The cache saved ${percent(cached / prompt)} of the prompts.`,
    forced > 0 && `The grammar forced ${percent(forced / output)} of the output.`,
    `Seed ${run.seed}.`,
  ].filter(Boolean);
  return (
    <section class="ledger" aria-label="Sums of the run" data-testid="ledger" data-status={status}>
      <dl>
        <Sum name="prompt tokens" value={count(prompt)} />
        <Sum name="from the cache" tint="cached" value={count(cached)} />
        <Sum name="computed" value={count(prompt - cached)} />
        <Sum name="generated" value={count(output)} />
        <Sum name="forced" tint="forced" value={count(forced)} />
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

function Sum(props: { name: string; value: string; tint?: "cached" | "forced" }) {
  return (
    <div>
      <dt>{props.tint ? <span class={props.tint}>{props.name}</span> : props.name}</dt>
      <dd data-testid={props.tint ? `${props.tint}-tokens` : undefined}>{props.value}</dd>
    </div>
  );
}
