// The call that is chosen in the timeline: its facts, and its text.
import { Fragment } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { Facts } from "../charts/Facts";
import { percent } from "../charts/numbers";
import { ImageMark } from "../images/ImageMark";
import { sharesOf } from "../playground/scores";
import { promptOf } from "./prompt";
import type { Call, RecordingReader } from "./recording";
import { factsOf, textOf } from "./words";

interface Props {
  readonly call: Call;
  readonly reader: RecordingReader;
  /** Drawn again when it changes. */
  readonly version: number;
  readonly onClose: () => void;
}

export function CallDetails({ call, reader, onClose }: Props) {
  const text = textOf(call);
  return (
    <section class="panel details call-details" aria-labelledby="call-name" data-testid="call-details">
      <header class="call-details-head">
        <h3 id="call-name">
          {call.kind} <bdi>{call.name}</bdi>
        </h3>
        <button type="button" class="quiet small" onClick={onClose}>
          Close
        </button>
      </header>
      <Facts facts={factsOf(call, reader.lastS)} />
      <div class="call-text">
        <Prompt call={call} reader={reader} />
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

/** Of a longer prompt the end is shown. */
const MAX_PROMPT_CHARS = 50_000;

function Prompt({ call, reader }: { call: Call; reader: RecordingReader }) {
  const box = useRef<HTMLDivElement>(null);
  // Its end tells calls apart: their beginnings are often the same.
  useLayoutEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [call]);
  let room = MAX_PROMPT_CHARS;
  const turns = promptOf(call, reader).reverse().flatMap(({ role, text, media = [] }) => {
    if (room <= 0) return [];
    const left = Math.max(0, text.length - room); // of its beginning
    room -= text.length;
    const shown = media.filter(({ at }) => at >= left);
    const places = [left, ...shown.map(({ at }) => at), text.length];
    const pieces = places.slice(1).map((at, index) => text.slice(places[index], at));
    return [{ role, shown, pieces: left ? [`…${pieces[0]}`, ...pieces.slice(1)] : pieces }];
  });
  if (turns.length === 0) return null;
  return (
    <div ref={box} class="call-prompt" tabIndex={0} role="region" aria-label="Prompt" data-testid="call-prompt">
      {turns.reverse().map(({ role, pieces, shown }, index) => (
        <div key={index}>
          {role !== null && <span class="role">{role}</span>}
          <p class="model-text" dir="auto">
            {pieces.map((piece, number) => (
              <Fragment key={number}>
                {number > 0 && <ImageMark name={shown[number - 1]?.kind} />}
                {piece}
              </Fragment>
            ))}
          </p>
        </div>
      ))}
    </div>
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
