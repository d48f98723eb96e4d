package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const pollInterval = 200 * time.Millisecond // for entries of another sidecar

// start is where a reader begins (`decode_start` of protocol.py).
type start struct {
	kind      string // "earliest", "latest", "id", "time" or "next"
	id        uint64
	raw       []byte // the id as it was sent
	inclusive bool
	timestamp uint64
}

// channel is what both kinds of channels can do.
type channel interface {
	policyOf() policy
	submit(p *part)
	describe(ctx context.Context) (first, latest uint64, err error)
	begin(ctx context.Context, from start) (position uint64, err error)
	read(ctx context.Context, position uint64, wait time.Duration) (records []record, latest uint64, err error)
	idAt(ctx context.Context, timestamp uint64) (uint64, error)
	truncate(ctx context.Context, id uint64) error
	hold(ctx context.Context, holder string, id uint64) error
	drop()
}

// news lets readers wait for a change.
type news struct{ changed chan struct{} }

func (n *news) wait() <-chan struct{} {
	if n.changed == nil {
		n.changed = make(chan struct{})
	}
	return n.changed
}

func (n *news) tell() {
	if n.changed != nil {
		close(n.changed)
		n.changed = nil
	}
}

// durable is a channel whose records are in a log of Woodpecker.
type durable struct {
	sidecar *sidecar
	name    string
	policy  policy
	base    uint64 // added to the numbers of segments in ids
	history *history
	writer  *writer

	mu     sync.Mutex
	stored *stored
	latest uint64 // the last record that is acknowledged, while `live`
	live   bool   // whether this sidecar has the channel's writer: then `tail` and `latest` are true
	tail   tail
	first  uint64 // the first record behind what was removed; 0 until it was looked up
	news   news
	gone   bool
}

func newDurable(s *sidecar, name string, found *stored) *durable {
	c := &durable{sidecar: s, name: name, policy: found.Policy, base: found.Base, stored: found}
	c.history = newHistory(s.client, found.Log, found.Base)
	c.writer = newWriter(c)
	return c
}

// zero is the id that all of the channel's records are above.
func (c *durable) zero() uint64 { return c.base << segmentShift }

func (c *durable) policyOf() policy { return c.policy }

func (c *durable) submit(p *part) { c.writer.submit(p) }

// begun is told by the writer: it has fenced all others, and `latest` is the last record.
func (c *durable) begun(latest uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.latest, c.live = max(latest, c.stored.Removed), !c.sidecar.isSuperseded()
	c.tail.restart(c.latest)
	c.news.tell()
}

// ended is told by the writer: it has the channel no more, or does not know what became of an append.
func (c *durable) ended() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live = false
	c.tail.restart(c.latest)
	c.news.tell()
}

// acknowledged is told by the writer, in the order of the log.
func (c *durable) acknowledged(records []record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.live {
		c.latest = records[len(records)-1].id
		c.tail.add(records, tailBytes)
		c.news.tell()
	}
}

// last is the id of the last record: of Woodpecker where this sidecar has not the writer.
func (c *durable) last(ctx context.Context) (uint64, error) {
	c.mu.Lock()
	latest, live, removed := c.latest, c.live, c.stored.Removed
	c.mu.Unlock()
	if live {
		return latest, nil
	}
	found, _, err := c.history.last(ctx)
	return max(found, removed), err
}

func (c *durable) describe(ctx context.Context) (uint64, uint64, error) {
	latest, err := c.last(ctx)
	if err != nil {
		return 0, 0, err
	}
	if latest == c.zero() {
		return 0, 0, nil
	}
	first, err := c.firstID(ctx, latest)
	return first, latest, err
}

func (c *durable) firstID(ctx context.Context, latest uint64) (uint64, error) {
	c.mu.Lock()
	first, removed := c.first, c.stored.Removed
	c.mu.Unlock()
	if first > removed || latest <= removed {
		return first, nil
	}
	records, err := c.stretch(ctx, removed+1, latest)
	if err != nil || len(records) == 0 {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stored.Removed == removed {
		c.first = records[0].id
	}
	return records[0].id, nil
}

// stretch are records from `position` to `latest`: from memory, or else from Woodpecker.
func (c *durable) stretch(ctx context.Context, position, latest uint64) ([]record, error) {
	c.mu.Lock()
	if c.live && position > c.tail.from {
		defer c.mu.Unlock()
		return c.tail.at(position), nil
	}
	c.mu.Unlock()
	return c.history.read(ctx, position, latest)
}

func (c *durable) begin(ctx context.Context, from start) (uint64, error) {
	c.mu.Lock()
	removed := c.stored.Removed
	c.mu.Unlock()
	switch from.kind {
	case "earliest":
		return removed + 1, nil
	case "next":
		return from.id, nil
	}
	latest, err := c.last(ctx)
	if err != nil {
		return 0, err
	}
	switch from.kind {
	case "latest":
		return latest + 1, nil
	case "time":
		at, err := c.idAt(ctx, from.timestamp)
		if err == nil && at == 0 {
			at = latest + 1
		}
		return at, err
	}
	there := len(from.raw) == 8 && from.id <= latest && (from.id > removed || (from.id == removed && !from.inclusive && removed > c.zero()))
	if there && from.id > removed {
		records, err := c.stretch(ctx, from.id, latest)
		if err != nil {
			return 0, err
		}
		there = len(records) > 0 && records[0].id == from.id
	}
	if !there {
		return 0, c.lost(ctx, from.raw, latest)
	}
	if from.inclusive {
		return from.id, nil
	}
	return from.id + 1, nil
}

func (c *durable) lost(ctx context.Context, requested []byte, latest uint64) error {
	first, err := c.firstID(ctx, latest)
	if err != nil {
		return err
	}
	message := fmt.Sprintf("channel %s does not go on at %x: it was removed, or never there", c.name, requested)
	return failure("PositionLost", message, map[string]any{
		"channel": c.name, "requested": requested, "first_available": wireLatest(first),
	})
}

func (c *durable) read(ctx context.Context, position uint64, wait time.Duration) ([]record, uint64, error) {
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	for {
		c.mu.Lock()
		changed, live, gone, removed := c.news.wait(), c.live, c.gone, c.stored.Removed
		c.mu.Unlock()
		latest, err := c.last(ctx)
		switch {
		case gone:
			return nil, 0, notFound(c.name)
		case err != nil:
			return nil, 0, err
		case position <= removed:
			return nil, 0, c.lost(ctx, wireID(position), latest)
		}
		if position <= latest {
			records, err := c.stretch(ctx, position, latest)
			if err != nil || len(records) > 0 {
				return records, latest, err
			}
		}
		var poll <-chan time.Time
		if !live || position <= latest {
			poll = time.After(pollInterval)
		}
		select {
		case <-changed:
		case <-poll:
		case <-deadline.C:
			return nil, latest, nil
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

// idAt looks where such a record may be, and from there for the first one: of what is there, an earlier one may have
// been removed.
func (c *durable) idAt(ctx context.Context, timestamp uint64) (uint64, error) {
	latest, err := c.last(ctx)
	if err != nil {
		return 0, err
	}
	position, err := c.history.at(ctx, timestamp)
	if err != nil || position == 0 {
		return 0, err
	}
	c.mu.Lock()
	position = max(position, c.stored.Removed+1)
	c.mu.Unlock()
	for position <= latest {
		records, err := c.stretch(ctx, position, latest)
		if err != nil || len(records) == 0 {
			return 0, err
		}
		for _, each := range records {
			if each.timestamp >= timestamp {
				return each.id, nil
			}
		}
		position = records[len(records)-1].id + 1
	}
	return 0, nil
}

// truncate removes what lies before `id` and before all holds: for readers at once, in Woodpecker by whole segments.
func (c *durable) truncate(ctx context.Context, id uint64) error {
	latest, err := c.last(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	end, removed := min(id, c.stored.lowestHold()), c.stored.Removed
	c.mu.Unlock()
	if end <= removed+1 {
		return nil
	}
	last := latest
	if end <= latest {
		if last, err = c.history.before(ctx, end); err != nil {
			return err
		}
	}
	if last <= removed {
		return nil
	}
	err = c.change(ctx, func(record *channelRecord) {
		if last < record.lowestHold() {
			record.Removed = max(record.Removed, last)
		}
	})
	if err != nil {
		return err
	}
	return c.history.truncate(ctx, last)
}

func (c *durable) hold(ctx context.Context, holder string, id uint64) error {
	return c.change(ctx, func(record *channelRecord) {
		holds := map[string]uint64{}
		for other, held := range record.Holds {
			holds[other] = held
		}
		if holds[holder] = id; id == 0 {
			delete(holds, holder)
		}
		record.Holds = holds
	})
}

// change stores the record of the channel as `alter` makes it.
func (c *durable) change(ctx context.Context, alter func(*channelRecord)) error {
	defer c.sidecar.changing.lock(c.name)()
	c.mu.Lock()
	known := c.stored
	c.mu.Unlock()
	changed, err := c.sidecar.registry.alter(ctx, c.name, known, alter)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stored = changed
	c.news.tell()
	return nil
}

func (c *durable) drop() {
	c.mu.Lock()
	c.gone, c.live = true, false
	c.tail.restart(c.latest)
	c.news.tell()
	c.mu.Unlock()
	c.writer.close(notFound(c.name))
	c.history.close()
}
