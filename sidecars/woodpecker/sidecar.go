package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sort"
	"sync"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/zilliztech/woodpecker/woodpecker"
)

const bootShift = 40 // of the ids in ephemeral channels: above it the sidecar's incarnation, below it a number

var channelName = regexp.MustCompile(`\A[A-Za-z0-9._-]{1,250}\z`)

// sidecar is the log: its channels, and whether this process still has it. The newest sidecar of a log has it; one that
// another has taken over from goes on reading, and appends nothing.
type sidecar struct {
	client     woodpecker.Client
	registry   registry
	local      *localStorage
	boot       uint64
	superseded atomic.Bool

	changing nameLocks // one change of the record of a channel at a time
	mu       sync.Mutex
	channels map[string]channel
	memory   uint64 // ids given to ephemeral channels so far are below it
}

func newSidecar(ctx context.Context, client woodpecker.Client, etcd *clientv3.Client, local *localStorage) (*sidecar, error) {
	s := &sidecar{client: client, registry: registry{etcd: etcd}, local: local, channels: map[string]channel{}}
	boot, over, err := s.registry.takeOver(ctx)
	if err != nil {
		return nil, err
	}
	s.boot, s.registry.boot, s.memory = boot, boot, boot<<bootShift
	go func() {
		<-over
		s.supersede()
	}()
	known, err := s.registry.all(ctx)
	if err != nil {
		return nil, err
	}
	for name, found := range known {
		s.channels[name] = s.made(name, found)
	}
	return s, nil
}

func (s *sidecar) made(name string, found *stored) channel {
	if found.Policy.Ephemeral {
		return s.ephemeral(name, found.Policy)
	}
	return newDurable(s, name, found)
}

// ephemeral makes a channel; 2**28 ids lie between two channels that are made one behind the other.
func (s *sidecar) ephemeral(name string, p policy) channel {
	s.memory += 1 << 28
	return newEphemeral(name, p, s.memory)
}

func (s *sidecar) isSuperseded() bool { return s.superseded.Load() }

// checkOwner asks etcd whether this sidecar has the log still.
func (s *sidecar) checkOwner(ctx context.Context) error {
	owner, err := s.registry.owner(ctx)
	if err == nil && owner != s.boot {
		s.supersede()
	}
	return err
}

// supersede is called once another sidecar has the log: from now on readers look for its entries in Woodpecker.
func (s *sidecar) supersede() {
	s.superseded.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, each := range s.channels {
		if found, isDurable := each.(*durable); isDurable {
			found.ended()
		}
	}
}

// find is the channel of that name. One that another sidecar has made is found, too.
func (s *sidecar) find(ctx context.Context, name string) (channel, error) {
	s.mu.Lock()
	found := s.channels[name]
	s.mu.Unlock()
	if found != nil {
		return found, nil
	}
	if !s.isSuperseded() {
		return nil, notFound(name)
	}
	known, err := s.registry.get(ctx, name)
	if err != nil {
		return nil, err
	}
	if known == nil || known.Dropped {
		return nil, notFound(name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.channels[name] == nil {
		s.channels[name] = s.made(name, known)
	}
	return s.channels[name], nil
}

func (s *sidecar) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make([]string, 0, len(s.channels))
	for name := range s.channels {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

func (s *sidecar) create(ctx context.Context, name string, p policy) error {
	if !channelName.MatchString(name) {
		return invalid(fmt.Sprintf("channel name %q is not 1-250 characters of A-Z a-z 0-9 . _ -", name))
	}
	defer s.changing.lock(name)()
	s.mu.Lock()
	there := s.channels[name]
	s.mu.Unlock()
	if there == nil {
		if s.isSuperseded() {
			return fenced(name)
		}
		registered, err := s.register(ctx, name, p)
		if err != nil {
			return err
		}
		s.mu.Lock()
		there = s.made(name, registered)
		s.channels[name] = there
		s.mu.Unlock()
	}
	if !there.policyOf().equals(p) {
		return failure("ChannelExists", "channel "+name+" exists with another policy", map[string]any{"channel": name})
	}
	return nil
}

// register stores a new channel, or finds the one that was stored by a request whose answer was lost. A temporary one
// ends with the process that made it, and is stored nowhere.
func (s *sidecar) register(ctx context.Context, name string, p policy) (*stored, error) {
	if p.Temporary {
		return &stored{channelRecord: channelRecord{Policy: p}}, nil
	}
	known, err := s.registry.get(ctx, name)
	if err != nil || (known != nil && !known.Dropped) {
		return known, err
	}
	record, revision := channelRecord{Policy: p}, int64(0)
	if known != nil {
		record.Number, revision = known.Number+1, known.revision
		if record.Base, err = s.baseBehind(ctx, known); err != nil {
			return nil, err
		}
	}
	if !p.Ephemeral {
		record.Log = fmt.Sprintf("%s.%d", name, record.Number)
		record.Removed = record.Base << segmentShift
		exists, err := s.client.LogExists(ctx, record.Log)
		if err == nil && !exists {
			err = s.client.CreateLog(ctx, record.Log)
		}
		if err != nil {
			return nil, err
		}
	}
	return s.registry.put(ctx, name, record, revision)
}

// baseBehind is the base of a channel that is made behind the dropped one: its ids are above all that this one has given.
func (s *sidecar) baseBehind(ctx context.Context, dropped *stored) (uint64, error) {
	base := dropped.Base
	if dropped.Log == "" {
		return base, nil
	}
	handle, err := s.client.OpenLog(ctx, dropped.Log)
	if err != nil {
		return 0, err
	}
	defer handle.Close(ctx)
	segments, err := handle.GetSegments(ctx)
	for number := range segments {
		base = max(base, dropped.Base+uint64(number)+1)
	}
	return base, err
}

// drop stores that a channel is dropped, answers, and ends the channel: its writer may wait long for the storage, and only
// a new channel of that name waits for it. What it has in Woodpecker, which deletes no log, stays.
func (s *sidecar) drop(ctx context.Context, name string) error {
	unlock := s.changing.lock(name)
	s.mu.Lock()
	found := s.channels[name]
	s.mu.Unlock()
	err := s.unregister(ctx, name, found)
	if err != nil || found == nil {
		unlock()
		return err
	}
	s.mu.Lock()
	delete(s.channels, name)
	s.mu.Unlock()
	go func() {
		defer unlock()
		found.drop()
	}()
	return nil
}

// unregister stores that a channel is dropped. Where etcd does not say whether it has that, the channel goes on until it
// is dropped again.
func (s *sidecar) unregister(ctx context.Context, name string, found channel) error {
	switch {
	case found == nil:
		return nil
	case s.isSuperseded():
		return fenced(name)
	case found.policyOf().Temporary:
		return nil
	}
	known, err := s.registry.get(ctx, name)
	if err == nil && known != nil && !known.Dropped {
		_, err = s.registry.alter(ctx, name, known, func(record *channelRecord) { record.Dropped, record.Holds = true, nil })
	}
	var named *tidewalError
	switch {
	case errors.As(err, &named) && named.code == "ChannelNotFound": // an earlier request is stored only now
		return nil
	case err == nil || named != nil:
		return err
	}
	message := fmt.Sprintf("whether channel %s is dropped is not known, drop it again: %v", name, err)
	return failure("Unavailable", message, nil)
}

// close ends the writers, so that what was accepted is stored and answered.
func (s *sidecar) close() {
	closing := failure("Unavailable", "the sidecar is closing", nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	var ended sync.WaitGroup
	for _, each := range s.channels {
		if found, isDurable := each.(*durable); isDurable {
			ended.Add(1)
			go func() {
				defer ended.Done()
				found.writer.close(closing)
			}()
		}
	}
	ended.Wait()
}
