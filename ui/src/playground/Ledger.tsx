// The sums of a run, and what the cache saved; its words are the legend of the tints.
import { session } from "../app/session";
import type { ProgramRun } from "./run";

const number = (value: number) => value.toLocaleString("en");
const percent = (part: number, whole: number) => `${Math.round((100 * part) / Math.max(1, whole))} %`;

export function Ledger({ run }: { run: ProgramRun }) {
  const { prompt, cached, output, forced } = run.totals.value;
  const status = run.status.value;
  const duration = run.duration.value;
  const says = [
    status === "running" && "Running.",
    status === "stopped" && "Stopped.",
    status === "done" && duration !== null && `Done in ${duration.toFixed(1)} s.`,
    prompt > 0 && `The cache saved ${percent(cached, prompt)} of the prompts.`,
    forced > 0 && `The grammar forced ${percent(forced, output)} of the output.`,
    `Seed ${run.seed}.`,
  ].filter(Boolean);
  return (
    <section class="ledger" aria-label="Sums of the run" data-testid="ledger" data-status={status}>
      <dl>
        <Sum name="prompt tokens" value={number(prompt)} />
        <Sum name="from the cache" tint="cached" value={number(cached)} />
        <Sum name="computed" value={number(prompt - cached)} />
        <Sum name="generated" value={number(output)} />
        <Sum name="forced" tint="forced" value={number(forced)} />
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
