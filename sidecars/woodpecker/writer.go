package main

import (
	"context"
	"fmt"
	"sync"

	"github.com/zilliztech/woodpecker/common/werr"
	"github.com/zilliztech/woodpecker/proto"
	"github.com/zilliztech/woodpecker/woodpecker/log"
)

const packsInFlight = 16

// writer appends to one durable channel: it gathers the parts that wait into packs, and has some packs on their way at
// once. It opens Woodpecker's writer, which fences all others, with the first append.
type writer struct {
	channel *durable

	mu      sync.Mutex
	waiting []*part
	running bool
	closed  *tidewalError
	wake    chan struct{}
	over    chan struct{} // closed when nothing is on its way any more

	// Of the goroutine that runs:
	log     log.LogWriter
	handle  log.LogHandle
	top     uint64
	segment int64 // of the last pack
	flights chan *flight
	flying  sync.WaitGroup

	failedMu sync.Mutex
	failed   error // the first error of a pack whose outcome is unknown: the writer is opened anew behind it
}

// flight is a pack that was handed to Woodpecker.
type flight struct {
	parts  []*part
	result <-chan *log.WriteResult
}

func newWriter(c *durable) *writer {
	return &writer{channel: c, wake: make(chan struct{}, 1), over: make(chan struct{})}
}

// submit queues a part. The order of the calls is the order of the log.
func (w *writer) submit(p *part) {
	parts := p.split()
	w.mu.Lock()
	if w.closed != nil {
		w.mu.Unlock()
		for _, each := range parts {
			each.fail(w.closed)
		}
		return
	}
	w.waiting = append(w.waiting, parts...)
	if !w.running {
		w.running = true
		w.flights = make(chan *flight, packsInFlight)
		go w.run()
		go w.settle()
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// close ends the writer; what waits fails with `reason`. Returns once nothing is on its way any more.
func (w *writer) close(reason *tidewalError) {
	w.mu.Lock()
	w.closed = reason
	running := w.running
	w.mu.Unlock()
	if running {
		select {
		case w.wake <- struct{}{}:
		default:
		}
		<-w.over
	}
}

// next takes the parts of the next pack; nil once the writer is closed.
func (w *writer) next() []*part {
	for {
		w.mu.Lock()
		if w.closed != nil {
			w.mu.Unlock()
			return nil
		}
		if len(w.waiting) > 0 {
			count, size, records := 0, 0, 0
			for count < len(w.waiting) {
				part := w.waiting[count]
				size, records = size+part.size(), records+len(part.records)
				if count > 0 && (size > packBytes || records > packRecords) {
					break
				}
				count++
			}
			taken := append([]*part(nil), w.waiting[:count]...)
			w.waiting = w.waiting[count:]
			w.mu.Unlock()
			return taken
		}
		w.mu.Unlock()
		<-w.wake
	}
}

func (w *writer) run() {
	for {
		parts := w.next()
		if parts == nil {
			break
		}
		if err := w.append(parts); err != nil {
			for _, each := range parts {
				each.fail(err)
			}
		}
	}
	w.flying.Wait()
	close(w.flights)
	w.shut()
	w.mu.Lock()
	left := w.waiting
	w.waiting = nil
	w.mu.Unlock()
	for _, each := range left {
		each.fail(w.closed)
	}
	close(w.over)
}

// append hands a pack to Woodpecker. An error says that nothing of it is in the log.
func (w *writer) append(parts []*part) *tidewalError {
	ctx := context.Background()
	if w.hasFailed() {
		w.flying.Wait()
		w.shut()
	}
	if w.channel.sidecar.isSuperseded() {
		return fenced(w.channel.name)
	}
	if w.log == nil {
		if err := w.open(ctx); err != nil {
			return translated(err, w.channel.name)
		}
	}
	var records []record
	for _, each := range parts {
		records = append(records, each.records...)
	}
	top := w.top
	for _, each := range records {
		top = max(top, each.timestamp)
	}
	message := &log.WriteMessage{Payload: encodePack(top, records)}
	for {
		result := w.log.WriteAsync(ctx, message)
		select {
		case refused := <-result: // at once: Woodpecker has not taken it
			if refused.Err != nil && werr.ErrSegmentHandleSegmentRolling.Is(refused.Err) {
				w.flying.Wait() // nothing may get in front of it: wait for all before it, and hand it over again
				continue
			}
			decided := make(chan *log.WriteResult, 1)
			decided <- refused
			result = decided
		default:
		}
		w.top = top
		w.flying.Add(1)
		w.flights <- &flight{parts, result}
		return nil
	}
}

// settle waits for the packs on their way, in order, and answers.
func (w *writer) settle() {
	for each := range w.flights {
		result := <-each.result
		if result.Err != nil {
			w.fail(each, result.Err)
		} else {
			w.acknowledge(each, place{result.LogMessageId.SegmentId, result.LogMessageId.EntryId})
		}
		w.flying.Done()
	}
}

func (w *writer) acknowledge(done *flight, at place) {
	base := w.channel.base
	if at.entry >= entriesLimit || base+uint64(at.segment) >= segmentsLimit {
		panic(fmt.Sprintf("(%d, %d) does not fit into an id", at.segment, at.entry))
	}
	if at.segment != w.segment {
		w.segment = at.segment
		w.channel.sidecar.local.began(w.handle.GetId(), at.segment)
	}
	var records []record
	index := firstOfSegment
	for _, part := range done.parts {
		for i := range part.records {
			part.records[i].id = at.id(base, index)
			index++
		}
		records = append(records, part.records...)
	}
	w.channel.acknowledged(records)
	for _, part := range done.parts {
		part.done()
	}
}

// fail answers a pack that may be in the log. Until the next writer has fenced this one nobody knows whether it is, so
// readers are to look into Woodpecker, and not into the tail.
func (w *writer) fail(lost *flight, err error) {
	w.failedMu.Lock()
	if w.failed == nil {
		w.failed = err
	}
	w.failedMu.Unlock()
	w.channel.ended()
	reported := translated(err, w.channel.name)
	if w.channel.sidecar.isSuperseded() {
		reported = fenced(w.channel.name)
	}
	for _, part := range lost.parts {
		part.fail(ofUnknownOutcome(reported))
	}
}

func (w *writer) hasFailed() bool {
	w.failedMu.Lock()
	defer w.failedMu.Unlock()
	return w.failed != nil
}

// open fences all other writers of the channel, and finds out what is the last record.
// A sidecar from which the log was taken opens none: where a fence in Woodpecker ended its writer, it learns it here.
func (w *writer) open(ctx context.Context) error {
	if err := w.channel.sidecar.checkOwner(ctx); err != nil {
		return err
	}
	if w.channel.sidecar.isSuperseded() {
		return fenced(w.channel.name)
	}
	handle, err := w.channel.sidecar.client.OpenLog(ctx, w.channel.history.log)
	if err != nil {
		return err
	}
	if err = w.reopen(ctx, handle); err != nil {
		_ = handle.Close(ctx)
		return err
	}
	opened, err := handle.OpenLogWriter(ctx)
	if err != nil {
		_ = handle.Close(ctx)
		return err
	}
	latest, top, err := w.channel.history.last(ctx)
	if err != nil {
		_ = opened.Close(ctx)
		return err
	}
	w.handle, w.log, w.top, w.segment = handle, opened, top, -1
	w.channel.begun(max(latest, w.channel.zero()))
	return nil
}

// reopen readies the segments on this machine that the last writer has left active.
func (w *writer) reopen(ctx context.Context, handle log.LogHandle) error {
	local := w.channel.sidecar.local
	if local == nil {
		return nil
	}
	known, err := handle.GetSegments(ctx)
	if err != nil {
		return err
	}
	for number, meta := range known {
		if meta.Metadata.State == proto.SegmentState_Active {
			if err = local.reopen(handle.GetId(), number); err != nil {
				return err
			}
		}
	}
	return nil
}

// shut closes Woodpecker's writer, which completes the segment; where another one has it, there is nothing to complete.
func (w *writer) shut() {
	if w.log != nil {
		_ = w.log.Close(context.Background())
		w.log, w.handle = nil, nil
	}
	w.failedMu.Lock()
	w.failed = nil
	w.failedMu.Unlock()
}
