// Who was asked what, and what it said.

function drawHead() {
  const { model, answer, versus } = data;
  $('model-name').textContent = model.name;
  $('model-facts').textContent = `${model.n_layers} blocks of ${model.n_heads} heads, ${whole(model.d_model)} wide · `
    + `${model.dtype} on ${model.device} · ${data.tokens.length} tokens`;
  follow(['pos'], () => tokenText($('prompt'), { label: 'Prompt, token by token' }));
  const rows = [[answer, data.answer_given ? 'the answer' : 'the first choice'], ...(versus ? [[versus, 'compared with']] : [])];
  const head = el('tr', {}, ['', 'probability', 'logit', 'rank'].map((text) => el('th', { scope: 'col', text })));
  fill($('answer'), el('table', { class: 'answers' }, el('thead', {}, head), el('tbody', {}, rows.map(answerRow),
    versus && el('tr', {}, el('td', { text: 'difference' }), el('td', {}),
      el('td', { class: 'n', text: signed(answer.logit - versus.logit) }), el('td', {})))));
  const asked = new Set([answer.id, versus && versus.id]);
  fill($('next'), topList(data.next.map((token) => ({
    label: token.label, value: token.probability, asked: asked.has(token.id),
    told: [percent(token.probability), number(token.logit)],
  })), ['probability', 'logit']));
}

function answerRow([token, what], i) {
  const name = el('td', {}, el('span', { class: 'word' }, word(token.label)), el('span', { class: 'what', text: what }));
  const rank = token.rank === 0 ? '0, first' : whole(token.rank);
  return el('tr', { class: i ? '' : 'first' }, name, [number(token.probability), number(token.logit), rank]
    .map((text) => el('td', { class: 'n', text })));
}
