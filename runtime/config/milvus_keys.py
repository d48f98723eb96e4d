"""Keys that a milvus.yaml may hold and that mean nothing in Tidewal: shell patterns over whole dotted keys.

Those of a backend's section stand there (`BackendSettings.ignored_keys`). With them a milvus.yaml can be
given as it is; what is ignored is named in one warning.
"""

from __future__ import annotations

from .settings import BACKEND_SECTIONS

_PATTERNS = """
autoIndex.* cdc.* credential.* dataCoord.* etcd.* function.* gpu.* grpc.* indexCoord.* indexNode.* internaltls.*
knowhere.* localStorage.* log.file.* log.stdout metastore.* minio.* mixCoord.* natsmq.* queryCoord.* streaming.*
streamingNode.grpc.* streamingNode.ip streamingNode.port tikv.* tls.* trace.*
mq.ignoreBadPosition mq.receiveBufSize mq.dispatcher.*
msgChannel.subNamePrefix.* msgChannel.chanNamePrefix.*
rootCoord.max* rootCoord.min* rootCoord.import* rootCoord.enableActiveStandby rootCoord.ip rootCoord.port
rootCoord.grpc.*
proxy.accessLog.* proxy.connection* proxy.ddlConcurrency proxy.dclConcurrency proxy.gin* proxy.graceful*
proxy.grpc.* proxy.healthCheckTimeout proxy.http.* proxy.internalPort proxy.ip proxy.maxConnectionNum
proxy.maxDimension proxy.maxFieldNum proxy.maxNameLength proxy.maxRoleNum proxy.maxTaskNum proxy.maxUserNum
proxy.maxVectorFieldNum proxy.msgStream.* proxy.mustUsePartitionKey proxy.port proxy.queryNodePooling.*
proxy.slowQuerySpanInSeconds
queryNode.cache.* queryNode.dataSync.* queryNode.enableDisk queryNode.grouping.* queryNode.grpc.* queryNode.ip
queryNode.loadMemoryUsageFactor queryNode.maxDiskUsagePercentage queryNode.mmap.* queryNode.port
queryNode.scheduler.* queryNode.segcore.* queryNode.stats.* queryNode.workerPooling.*
dataNode.channel.* dataNode.compaction.* dataNode.dataSync.* dataNode.grpc.* dataNode.import.* dataNode.ip
dataNode.memory.* dataNode.port dataNode.segment.* dataNode.storage.* dataNode.timetick.*
common.DiskIndex.* common.ImportMaxFileSize common.bloomFilter* common.buildIndexThreadPoolRatio
common.chanNamePrefix.* common.default* common.enable* common.entityExpiration common.gracefulStopTimeout
common.indexSliceSize common.locks.* common.maxBloomFalsePositive common.security.*
common.session.* common.simdType common.storage.* common.storageType common.subNamePrefix.*
common.threadCoreCoefficient.* common.traceLogMode common.ttMsgEnabled
quotaAndLimits.enabled quotaAndLimits.limits.* quotaAndLimits.quotaCenterCollectInterval quotaAndLimits.ddl.*
quotaAndLimits.indexRate.* quotaAndLimits.flushRate.* quotaAndLimits.compactionRate.*
quotaAndLimits.dml.* quotaAndLimits.dql.* quotaAndLimits.limitReading.* quotaAndLimits.limitWriting.ttProtection.*
quotaAndLimits.limitWriting.memProtection.dataNode* quotaAndLimits.limitWriting.growingSegmentsSizeProtection.*
quotaAndLimits.limitWriting.diskProtection.*
"""

IGNORED_MILVUS_KEYS: tuple[str, ...] = (
    *_PATTERNS.split(),
    *(f"{name}.{pattern}" for name, section in BACKEND_SECTIONS.items() for pattern in section.ignored_keys),
)
