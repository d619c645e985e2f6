// The call that is chosen in the timeline: its facts, and its text.
import { Facts } from "../charts/Facts";
import { percent } from "../charts/numbers";
import { sharesOf } from "../playground/scores";
import type { Call } from "./recording";
import { factsOf, textOf } from "./words";

/** `version`: drawn again when it changes. */
export function CallDetails({ call, lastS }: { call: Call; lastS: number; version: number }) {
  const text = textOf(call);
  return (
    <section class="panel details call-details" aria-labelledby="call-name" data-testid="call-details">
      <h3 id="call-name">
        {call.kind} <bdi>{call.name}</bdi>
      </h3>
      <Facts facts={factsOf(call, lastS)} />
      <div class="call-text">
        {call.error !== null && (
          <p class="call-error">
            <code>{call.error.code}</code> <bdi>{call.error.message}</bdi>
          </p>
        )}
        {call.choices !== null && <Choices choices={call.choices} />}
        {text !== "" && (
          <pre class="model-text" tabIndex={0} aria-label="Text">
            {text}
          </pre>
        )}
        {text === "" && call.error === null && <p class="figure-note">No text.</p>}
      </div>
    </section>
  );
}

const MAX_CHOICES = 50;

/** The scores of a select, the likeliest choice first. */
function Choices({ choices }: { choices: Readonly<Record<string, number>> }) {
  const shares = sharesOf(choices).slice(0, MAX_CHOICES);
  return (
    <ul class="call-choices">
      {shares.map(({ choice, share }) => (
        <li key={choice}>
          <bdi>{choice}</bdi>
          <span class="choice-bar" aria-hidden="true">
            <span style={{ width: `${share * 100}%` }} />
          </span>
          <span>{percent(share)}</span>
        </li>
      ))}
    </ul>
  );
}
